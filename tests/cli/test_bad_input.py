"""Drawn mistakes on the command line and in constructors end with one readable message."""

import contextlib
import datetime
import inspect
import io
import itertools
import os
import random
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch import Trainer
from omegaconf import OmegaConf

import lightning_ddp_ext
from lightning_ddp_ext import (
    BalancedDataParallelStrategy,
    BalancedDDPStrategy,
    DDPCheckpointStrategy,
    DDPExtError,
    DDPJoinStrategy,
    ExplicitDDPStrategy,
    ManualEnvironment,
)
from lightning_ddp_ext.callbacks import BalanceReport, GradientCheck, JoinReport, PredictionWriter, ReplicaConsistency
from lightning_ddp_ext.cli import train
from lightning_ddp_ext.cli.main import main
from lightning_ddp_ext.demo.byte_text import ByteTransformer, StdlibStream, StdlibText
from lightning_ddp_ext.demo.digits import DigitsCNN, DigitsData, SlowedDigitsCNN
from lightning_ddp_ext.strategies.connected import ConnectedDDPStrategy, ConnectedFSDPStrategy, ConnectedStrategy
from tests.cli.commands import names_setting

CONF = Path(lightning_ddp_ext.__file__).parent / "conf"
ARGUMENTS, SEED = 10_000, 6
LIMIT = 60  # seconds for one command line

# Together, the bases have every setting that works without a GPU.
BASES = [
    [],
    ["strategy=single", "experiment=byte_transformer", "callbacks=gradient_check"],
    ["experiment=slow_replica", "callbacks=replica_consistency"],
    ["strategy=ddp_join", "process_group=gloo", "network=auto", "callbacks=join_report"],
    ["strategy=ddp_join", "experiment=stdlib_stream"],
    ["strategy=ddp_checkpoint", "callbacks=replica_consistency"],
    ["strategy=balanced_ddp", "callbacks=prediction_writer"],
    ["strategy=ddp", "process_group=gloo", "network=loopback"],
    ["strategy=ddp", "cluster=manual", "cluster.num_nodes=2", "cluster.node_rank=0", "cluster.main_address=127.0.0.1"],
]

VALUES = [
    "abc", "''", "'ünïcode ☃'", "[1,2]", "[]", "[[1],[x]]", "{a:1}", "{a:{b:[1,{c:2}]}}", "null", "true", "-1", "0",
    "7", "2.5", "-0.5", "nan", "inf", "-inf", "1e308", "1000000000000000000000000000000", "'two words'",
    "no.such.Class", "/no/such/file", "'" + 3000 * "x" + "'", "'99:99:99:99'", "'${nowhere}'", "auto", "none",
    "'a\\nb'",
]  # fmt: skip

OBJECTS = [
    None, True, -1, 0, 3, 2.5, float("nan"), float("inf"), 1e308, 10**30, "", "abc", "ünïcode ☃", b"bytes", [], [1],
    ["a"], [[1]], (1, 2), {}, {"a": 1}, {1, 2}, object(), object, len, lambda batch: "x", 1 + 2j,
    datetime.timedelta(0), datetime.timedelta(-1), datetime.timedelta.max, "x" * 3000, "/no/such/file", "tcp://:0",
    "file://x", "a..b",
]  # fmt: skip


def assert_readable(kind, refused, problems, number, capsys):
    with capsys.disabled():
        print(f"\n{number} {kind}: {refused} refused, {number - refused} accepted", end=" ")
    assert not problems, f"{len(problems)} of {number}:\n" + "\n".join(problems)
    assert 0 < refused < number


def list_keys(node, prefix=""):
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from list_keys(value, f"{name}.")
        if prefix or not isinstance(value, dict):
            yield name


def draw_overrides(number, seed):
    """Draw right arguments of the command, one more that may be wrong, and the key that an error has to name."""
    draw = random.Random(seed)
    options = {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in CONF.iterdir()}
    keys = []
    with initialize_config_module("lightning_ddp_ext.conf", version_base="1.3"):
        for base in BASES:
            config = OmegaConf.to_container(compose("train", overrides=base), resolve=False)
            keys.append(sorted(list_keys(config)))
    for _ in range(number):
        base, names = draw.choice([*zip(BASES, keys, strict=True)])
        key, value = draw.choice(names), draw.choice(VALUES)
        kind = draw.choice(["value"] * 6 + ["misspelt", "removed", "below", "group"])
        if kind == "misspelt":
            at = draw.randrange(1, len(key))
            swapped = f"{key[: at - 1]}{key[at]}{key[at - 1]}{key[at + 1 :]}"
            key = draw.choice([f"{key[:at]}{key[at - 1]}{key[at:]}", f"{key[:at]}{key[at + 1 :]}" or "x", swapped])
        elif kind == "group":
            others = sorted({*itertools.chain(*options.values())})
            key = draw.choice(sorted(options))
            value = draw.choice(["nosuch", "null", "''", "[]", "[a,b]", "{a:1}", "1", draw.choice(others)])
        below = f"+{key}.{draw.choice(['deeper', 'a.b.c'])}={value}"
        yield [*base, {"removed": f"~{key}", "below": below}.get(kind, f"{key}={value}")], key


class Accepted(BaseException):
    """The run has been built and could start; Hydra lets it pass."""


def fit_instead(config, run):
    raise Accepted


def interrupt(signum, frame):
    raise TimeoutError("it hangs")


def complaint_about_command(arguments, key):
    """Return whether the command refuses the arguments, and why the message is not readable, or None."""
    sys.argv[:] = ["lightning-ddp-ext", *arguments]
    GlobalHydra.instance().clear()
    os.environ["HYDRA_FULL_ERROR"] = "0"
    printed = io.StringIO()
    signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(LIMIT)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            main()
    except Accepted:
        return False, None
    except SystemExit as ended:
        code, errors = ended.code, printed.getvalue()
    except Exception as error:
        return True, f"{type(error).__name__} leaves the command: {error}"
    finally:
        signal.alarm(0)
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
    is_one_line = errors.startswith("lightning-ddp-ext: ") and len(errors.splitlines()) == 1
    is_readable = code == 1 and "Traceback" not in errors and is_one_line and names_setting(key, errors)
    return True, None if is_readable else f"exit code {code}, or not one line that names `{key}`: {errors[-700:]}"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("number", "seed"), [(60, SEED), pytest.param(1000, SEED + 1, marks=pytest.mark.exhaustive)])
def test_a_wrong_command_line_is_one_message_that_names_the_setting(monkeypatch, tmp_path, capsys, number, seed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_fit", fit_instead)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    problems, refused = [], 0
    for arguments, key in draw_overrides(number, seed):
        is_refused, problem = complaint_about_command(arguments, key)
        refused += is_refused
        if problem is not None:
            problems.append(f"{' '.join(arguments)[:300]}\n    {problem}")
    assert_readable("command lines", refused, problems, number, capsys)


# Constructors with right arguments.
CONSTRUCTORS = {
    BalancedDataParallelStrategy: {},
    DDPCheckpointStrategy: {},
    DDPJoinStrategy: {},
    BalancedDDPStrategy: {},
    ConnectedDDPStrategy: {},
    ConnectedFSDPStrategy: {},
    BalanceReport: {},
    GradientCheck: {},
    JoinReport: {},
    PredictionWriter: {"folder": "predictions"},
    ReplicaConsistency: {},
    ManualEnvironment: {"num_nodes": 2, "node_rank": 1, "main_address": "node1"},
    DigitsCNN: {},
    DigitsData: {},
    SlowedDigitsCNN: {"milliseconds_per_sample": [1.0]},
    ByteTransformer: {"depth": 1},
    StdlibText: {},
    StdlibStream: {},
}
STRATEGIES = (
    BalancedDataParallelStrategy, DDPCheckpointStrategy, DDPJoinStrategy, BalancedDDPStrategy, ConnectedDDPStrategy,
)  # fmt: skip
NOT_CHECKED = {"ddp_comm_state", "options", "unknown", "args", "self"}


def arguments_of(kind):
    bases = [base for base in (ExplicitDDPStrategy, ConnectedStrategy) if issubclass(kind, base)]
    names = {name for one in (kind, *bases) for name in inspect.signature(one).parameters}
    extra = {"start_method"} if kind is ConnectedDDPStrategy else set()
    return sorted((names | extra) - NOT_CHECKED)


def construct(kind, name, value):
    """Construct an object, and a Trainer for a strategy; return the error, or None."""
    try:
        made = kind(**{**CONSTRUCTORS[kind], name: value})
        if kind in STRATEGIES:
            Trainer(strategy=made, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    except Exception as error:
        return error
    return None


def test_a_wrong_argument_is_an_error_of_the_constructor_that_names_it(capsys):
    draw = random.Random(SEED)
    everything = [(kind, name) for kind in CONSTRUCTORS for name in arguments_of(kind)]
    problems, refused = [], 0
    for _ in range(ARGUMENTS):
        (kind, name), value = draw.choice(everything), draw.choice(OBJECTS)
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = construct(kind, name, value)
        refused += error is not None
        named = any(one in str(error) for one in (f"`{name}", f"`{value}`", f"`{name.replace('_', '.', 1)}`"))
        if error is not None and not (named and isinstance(error, TypeError | ValueError | DDPExtError)):
            problems.append(f"{kind.__name__}({name}={str(value)[:100]!r})\n    {type(error).__name__}: {error}")
    assert_readable("arguments", refused, problems, ARGUMENTS, capsys)

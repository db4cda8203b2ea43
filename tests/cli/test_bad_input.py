"""Whatever people write, they get a run or one readable message that names what they wrote."""

import contextlib
import inspect
import io
import os
import signal
import sys
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch import Trainer

from lightning_ddp_ext import (
    BalancedDataParallelStrategy,
    DDPCheckpointStrategy,
    DDPExtError,
    DDPJoinStrategy,
    ExplicitDDPStrategy,
    ManualEnvironment,
)
from lightning_ddp_ext.callbacks import BalanceReport, JoinReport, ReplicaConsistency
from lightning_ddp_ext.cli import train as train_module
from lightning_ddp_ext.cli.main import main
from lightning_ddp_ext.demo.byte_stream import StdlibStream
from lightning_ddp_ext.demo.byte_text import ByteTransformer, StdlibText
from lightning_ddp_ext.demo.digits import DigitsCNN, DigitsData
from lightning_ddp_ext.demo.slowed_digits import SlowedDigitsCNN
from lightning_ddp_ext.strategies.upstream import ddp_strategy, fsdp_strategy
from tests.cli.mutations import Override, draw_arguments, draw_overrides

MUTATIONS = int(os.environ.get("LIGHTNING_DDP_EXT_MUTATIONS", "500"))
SHARE = 0.12  # of command lines, which take most of the time; the others are arguments of constructors
SEED = 6
LIMIT = 60  # seconds for one mutation; what hangs, hangs longer
RUNS = 12  # of those that pass all checks, this many train two steps


class Accepted(BaseException):
    """Everything has been built, and could run."""


class Hang(BaseException):
    """A mutation takes too long."""


def shrink(run):
    """Let a run end after two steps."""
    trainer, loop = run.trainer, run.trainer.fit_loop
    if loop.max_epochs != -1 or loop.max_steps != -1:
        loop.epoch_loop.max_steps = 2 if loop.max_steps == -1 else min(2, loop.max_steps)
    for name in ("limit_val_batches", "limit_test_batches", "num_sanity_val_steps"):
        limit = getattr(trainer, name)
        setattr(trainer, name, min(limit, 1) if isinstance(limit, int) else 1)


class Command:
    """The command in this process."""

    def __init__(self, monkeypatch, folder, runs=0):
        self.folder = folder
        self.ran = Counter()
        self._runs = runs
        self._fit = train_module._fit
        monkeypatch.chdir(folder)
        monkeypatch.setattr(train_module, "_fit", self._instead)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "argv", list(sys.argv))

    def _instead(self, config, run):
        launcher = run.trainer.strategy.launcher
        several = launcher is not None and run.trainer.world_size > 1
        if several or sum(self.ran.values()) >= self._runs:
            raise Accepted
        self.ran["trained"] += 1
        shrink(run)
        self._fit(config, run)
        raise Accepted

    def __call__(self, *arguments):
        """Return None if a run would start, otherwise the exit code and what was printed to the two streams."""
        sys.argv[:] = ["lightning-ddp-ext", *arguments]
        GlobalHydra.instance().clear()
        os.environ["HYDRA_FULL_ERROR"] = "0"
        printed, errors = io.StringIO(), io.StringIO()
        before = signal.signal(signal.SIGALRM, _hang)
        signal.alarm(LIMIT)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                main()
        except Accepted:
            return None
        except SystemExit as ended:
            return ended.code, printed.getvalue(), errors.getvalue()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
            torch.use_deterministic_algorithms(False)
            torch.autograd.set_detect_anomaly(False)
            if dist.is_initialized():
                dist.destroy_process_group()
        raise AssertionError("the command came back without having trained")


def _hang(signum, frame):
    raise Hang


def complaint_about_message(key, code, errors):
    """Why what the command has printed is not readable; None if it is."""
    lines = errors.splitlines()
    if code != 1:
        return f"exit code {code}"
    if "Traceback" in errors:
        return "a traceback"
    if len(lines) != 1 or not lines[0].startswith("lightning-ddp-ext: "):
        return f"{len(lines)} lines"
    return None if names(key, lines[0]) else "the setting is not named"


def names(key, text):
    parts = key.split(".")
    # A misspelt key may be found out before its end.
    starts = (".".join(parts[:end]) for end in range(min(2, len(parts)), len(parts) + 1))
    return f"`{parts[-1]}" in text or any(start in text for start in starts)


def try_override(command, mutation):
    """Return whether it is refused, and what is wrong with how; the second is None if nothing is."""
    try:
        ended = command(*mutation.base, mutation.text)
    except Hang:
        return True, "it hangs"
    except Exception as error:
        return True, f"{type(error).__name__} leaves the command: {error}"
    if ended is None:
        return False, None
    code, _, errors = ended
    problem = complaint_about_message(mutation.key, code, errors)
    return True, None if problem is None else f"{problem}: {errors[-700:]}"


def report(kind, mutations, problems, refused, capsys):
    with capsys.disabled():
        print(f"\n{len(mutations)} {kind}: {refused} refused, {len(mutations) - refused} accepted", end=" ")
    assert not problems, f"{len(problems)} of {len(mutations)}:\n" + "\n".join(problems)


def fuzz_overrides(number, seed, monkeypatch, folder, capsys):
    command = Command(monkeypatch, folder, RUNS)
    mutations = draw_overrides(number, seed)
    problems, refused = [], 0
    for mutation in mutations:
        is_refused, problem = try_override(command, mutation)
        refused += is_refused
        if problem is not None:
            problems.append(f"{' '.join((*mutation.base, mutation.text[:200]))}\n    {problem}")
    report(f"command lines ({command.ran['trained']} trained)", mutations, problems, refused, capsys)
    assert 0 < refused < len(mutations)


@pytest.mark.slow
def test_a_wrong_command_line_is_one_message_that_names_the_setting(monkeypatch, tmp_path, capsys):
    fuzz_overrides(int(SHARE * MUTATIONS), SEED, monkeypatch, tmp_path, capsys)


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
def test_a_thousand_more_wrong_command_lines_are_messages(monkeypatch, tmp_path, capsys):
    fuzz_overrides(1000, SEED + 1, monkeypatch, tmp_path, capsys)


# By name: the class, arguments that are right, and whether a Trainer takes it as its strategy.
CONSTRUCTORS = {
    "BalancedDataParallelStrategy": (BalancedDataParallelStrategy, {}, True),
    "DDPCheckpointStrategy": (DDPCheckpointStrategy, {}, True),
    "DDPJoinStrategy": (DDPJoinStrategy, {}, True),
    "ddp_strategy": (ddp_strategy, {}, True),
    "fsdp_strategy": (fsdp_strategy, {}, False),
    "BalanceReport": (BalanceReport, {}, False),
    "JoinReport": (JoinReport, {}, False),
    "ReplicaConsistency": (ReplicaConsistency, {}, False),
    "ManualEnvironment": (ManualEnvironment, {"num_nodes": 2, "node_rank": 1, "main_address": "node1"}, False),
    "DigitsCNN": (DigitsCNN, {}, False),
    "DigitsData": (DigitsData, {}, False),
    "SlowedDigitsCNN": (SlowedDigitsCNN, {"milliseconds_per_sample": [1.0]}, False),
    "ByteTransformer": (ByteTransformer, {"depth": 1}, False),
    "StdlibText": (StdlibText, {}, False),
    "StdlibStream": (StdlibStream, {}, False),
}
_ANYTHING = {"ddp_comm_state", "options", "unknown", "args", "self"}


def arguments_of(target):
    kind = CONSTRUCTORS[target][0]
    names = set(inspect.signature(kind).parameters)
    if kind is DDPJoinStrategy:
        names |= set(inspect.signature(ExplicitDDPStrategy).parameters)
    extra = {"sharding_strategy", "state_dict_type"} if kind is fsdp_strategy else set()
    return sorted((names | extra) - _ANYTHING)


def complaint_about_error(argument, error):
    """Why an error of a constructor is not readable; None if it is."""
    if not isinstance(error, TypeError | ValueError | DDPExtError):
        return f"{type(error).__name__}: {error}"
    named = (f"`{argument.name}", f"`{argument.value!s}`", f"`{argument.name.replace('_', '.', 1)}`")
    if not any(name in str(error) for name in named):
        return f"the argument is not named: {error}"
    return None


def construct(argument):
    """Construct, and for a strategy the Trainer too; returns an error if there is one."""
    kind, right, is_strategy = CONSTRUCTORS[argument.target]
    try:
        made = kind(**{**right, argument.name: argument.value})
        if is_strategy:
            Trainer(strategy=made, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    except Exception as error:
        return error
    return None


def fuzz_arguments(number, seed, capsys):
    mutations = draw_arguments({target: arguments_of(target) for target in CONSTRUCTORS}, number, seed)
    problems, refused = [], 0
    for argument in mutations:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = construct(argument)
        refused += error is not None
        problem = None if error is None else complaint_about_error(argument, error)
        if problem is not None:
            problems.append(f"{argument.target}({argument.name}={str(argument.value)[:100]!r})\n    {problem}")
    report("arguments", mutations, problems, refused, capsys)
    assert 0 < refused < len(mutations)


def test_a_wrong_argument_is_an_error_of_the_constructor_that_names_it(capsys):
    fuzz_arguments(MUTATIONS - int(SHARE * MUTATIONS), SEED, capsys)


@pytest.mark.exhaustive
def test_ten_thousand_more_wrong_arguments_are_named(capsys):
    fuzz_arguments(10_000, SEED + 1, capsys)


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        ("lightning-ddp-ext: `model.width`: no number.\n", None),
        ("lightning-ddp-ext: in `model`: `width` must be an integer.\n", None),
        ("lightning-ddp-ext: something is wrong.\n", "the setting is not named"),
        ("Traceback (most recent call last):\n  model.width\n", "a traceback"),
        ("lightning-ddp-ext: `model.width`\nis wrong.\n", "2 lines"),
        ("Error: `model.width`\n", "1 lines"),
        ("", "0 lines"),
    ],
)
def test_what_is_readable_is_told_from_what_is_not(printed, problem):
    assert complaint_about_message("model.width", 1, printed) == problem
    assert complaint_about_message("model.width", 0, printed) == "exit code 0"


@pytest.mark.parametrize(
    ("error", "is_readable"),
    [
        (TypeError("`split` must be a sequence"), True),
        (ValueError("`split=[0]` must not be zero"), True),
        (TypeError("'<=' not supported between instances of 'int' and 'str'"), False),
        (AttributeError("`split`"), False),
    ],
)
def test_errors_of_constructors_are_told_apart(error, is_readable):
    argument = draw_arguments({"BalancedDataParallelStrategy": ["split"]}, 1, 0)[0]
    assert (complaint_about_error(argument, error) is None) == is_readable


def test_the_same_seed_draws_the_same_mutations():
    assert draw_overrides(20, 1) == draw_overrides(20, 1) != draw_overrides(20, 2)


# What was found, as small as it gets: each of these was a traceback, a hang or a message that named nothing.
FOUND = [
    ["model.width=abc"],
    ["model.width=1000000000000"],
    ["model.learning_rate=-1"],
    ["seed=inf"],
    ["seed=-1"],
    ["data.batch_size=1000000000000000000000000000000"],
    ["data.train_fractions=abc"],
    ["trainer.limit_train_batches=abc"],
    ["trainer.check_val_every_n_epoch=0"],
    ["trainer.val_check_interval=0"],
    ["trainer.gradient_clip_val=-1"],
    ["trainer.max_time=abc"],
    ["trainer.profiler=7"],
    ["trainer.fast_dev_run=abc"],
    ["trainer.deterministic=abc"],
    ["trainer.devices=1000000000000"],
    ["callbacks.checkpoint.filename=[1,2]"],
    ["callbacks.checkpoint._target_=builtins.dict"],
    ["logger.csv=7"],
    ["strategy=fsdp"],
    ["strategy=ddp_join", "strategy.timeout=abc"],
    ["strategy=ddp_join", "process_group=gloo", "process_group.timeout_seconds=-1"],
    ["strategy=ddp_join", "strategy.start_method=abc"],
    ["strategy=ddp_join", "strategy.bucket_cap_mb=inf"],
    ["strategy=ddp_join", "cluster.num_nodes=2"],
    ["strategy=ddp", "cluster=manual", "cluster.num_nodes=2", "cluster.node_rank=0", "cluster.main_address='a b'"],
    ["model=byte_transformer", "data=stdlib_text", "model.heads=0"],
]


@pytest.mark.slow
def test_what_was_found_before_is_refused(monkeypatch, tmp_path):
    command = Command(monkeypatch, tmp_path)
    problems = []
    for arguments in FOUND:
        mutation = Override(tuple(arguments[:-1]), arguments[-1], arguments[-1].partition("=")[0])
        is_refused, problem = try_override(command, mutation)
        if problem is not None or not is_refused:
            problems.append(f"{' '.join(arguments)}: {problem or 'accepted'}")
    assert not problems, "\n".join(problems)


# What only shows when a run starts.
FOUND_AT_THE_START = [
    ["trainer.val_check_interval=1000"],
    ["trainer.max_steps=-1", "trainer.max_epochs=-1"],
    ["strategy.batch_dim=7"],
    ["experiment=slow_replica", "model.milliseconds_per_sample=[1.0]"],
    ["strategy=single", "experiment=byte_transformer", "model.block_size=16"],
    ["strategy=single", "experiment=byte_transformer", "data.max_bytes=1000"],
    ["strategy=single", "ckpt_path=best"],
    ["strategy=single", "ckpt_path=nowhere://file"],
]


def test_what_was_found_at_the_start_of_a_run_is_refused(monkeypatch, tmp_path):
    command = Command(monkeypatch, tmp_path, runs=len(FOUND_AT_THE_START))
    problems = []
    for arguments in FOUND_AT_THE_START:
        mutation = Override(tuple(arguments[:-1]), arguments[-1], arguments[-1].partition("=")[0])
        is_refused, problem = try_override(command, mutation)
        if problem is not None or not is_refused:
            problems.append(f"{' '.join(arguments)}: {problem or 'accepted'}")
    assert not problems, "\n".join(problems)

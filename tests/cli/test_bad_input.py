"""Wrong command lines end with one readable message that names the setting."""

import contextlib
import io
import os
import signal
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from hydra.core.global_hydra import GlobalHydra

from lightning_ddp_ext.cli import train as train_module
from lightning_ddp_ext.cli.main import main
from tests.cli.mutations import MUTATIONS, SEED, SHARE, Override, check_readable, draw_overrides

LIMIT = 60  # seconds for one mutation
RUNS = 12  # number of accepted mutations that train two steps


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
        self.ran = 0
        self._runs = runs
        self._fit = train_module._fit
        monkeypatch.chdir(folder)
        monkeypatch.setattr(train_module, "_fit", self._instead)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "argv", list(sys.argv))

    def _instead(self, config, run):
        launcher = run.trainer.strategy.launcher
        several = launcher is not None and run.trainer.world_size > 1
        if several or self.ran >= self._runs:
            raise Accepted
        self.ran += 1
        shrink(run)
        self._fit(config, run)
        raise Accepted

    def __call__(self, *arguments):
        """Return None if a run would start, otherwise the exit code and the text on standard error."""
        sys.argv[:] = ["lightning-ddp-ext", *arguments]
        GlobalHydra.instance().clear()
        os.environ["HYDRA_FULL_ERROR"] = "0"
        ignored, errors = io.StringIO(), io.StringIO()
        before = signal.signal(signal.SIGALRM, _hang)
        signal.alarm(LIMIT)
        try:
            with (
                contextlib.redirect_stdout(ignored),
                contextlib.redirect_stderr(errors),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                main()
        except Accepted:
            return None
        except SystemExit as ended:
            return ended.code, errors.getvalue()
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
    """Return why the printed message is not readable, or None."""
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
    # The message may name only the beginning of a misspelt key.
    starts = (".".join(parts[:end]) for end in range(min(2, len(parts)), len(parts) + 1))
    return f"`{parts[-1]}" in text or any(start in text for start in starts)


def try_override(command, mutation):
    """Return whether the command refuses it, and why the message is not readable, or None."""
    try:
        ended = command(*mutation.base, mutation.text)
    except Hang:
        return True, "it hangs"
    except Exception as error:
        return True, f"{type(error).__name__} leaves the command: {error}"
    if ended is None:
        return False, None
    code, errors = ended
    problem = complaint_about_message(mutation.key, code, errors)
    return True, None if problem is None else f"{problem}: {errors[-700:]}"


def fuzz_overrides(number, seed, monkeypatch, folder, capsys):
    command = Command(monkeypatch, folder, RUNS)
    mutations = draw_overrides(number, seed)
    problems, refused = [], 0
    for mutation in mutations:
        is_refused, problem = try_override(command, mutation)
        refused += is_refused
        if problem is not None:
            problems.append(f"{' '.join((*mutation.base, mutation.text[:200]))}\n    {problem}")
    check_readable(f"command lines ({command.ran} trained)", mutations, problems, refused, capsys)


@pytest.mark.slow
def test_a_wrong_command_line_is_one_message_that_names_the_setting(monkeypatch, tmp_path, capsys):
    fuzz_overrides(int(SHARE * MUTATIONS), SEED, monkeypatch, tmp_path, capsys)


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
def test_a_thousand_more_wrong_command_lines_are_messages(monkeypatch, tmp_path, capsys):
    fuzz_overrides(1000, SEED + 1, monkeypatch, tmp_path, capsys)


def check_refused(command, found):
    problems = []
    for arguments in found:
        mutation = Override(tuple(arguments[:-1]), arguments[-1], arguments[-1].partition("=")[0])
        is_refused, problem = try_override(command, mutation)
        if problem is not None or not is_refused:
            problems.append(f"{' '.join(arguments)}: {problem or 'accepted'}")
    assert not problems, "\n".join(problems)


# Earlier finds: each of these was a traceback, a hang or a message that named nothing.
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
    ["trainer.fast_dev_run=abc"],
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
    check_refused(command, FOUND)


# Mistakes that show when a run starts.
FOUND_AT_THE_START = [
    ["trainer.profiler=7"],
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
    check_refused(command, FOUND_AT_THE_START)

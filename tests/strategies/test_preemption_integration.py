"""Runs that end on a signal at some moment, and resume as if nothing had happened."""

import random
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, WeightedRandomSampler
from torch.utils.data._utils import signal_handling

from lightning_ddp_ext import DDPJoinStrategy
from tests.strategies.ddp_ranks import quiet_trainer
from tests.strategies.join_ranks import samples
from tests.strategies.preemption_data import (
    RANK,
    STRATEGIES,
    WORLD_SIZE,
    Augmented,
    Case,
    Estimating,
    PlateauBySteps,
    RandomAdversaries,
    Tracing,
    Trail,
    Unnormalised,
    dealt,
    of_generators,
    own,
    stateful,
    streams,
)
from tests.support.processes import run_processes

pytestmark = pytest.mark.timeout(900)

# With 22 samples on two ranks in batches of 3, an epoch has 4 batches.
CASES = {
    "within an epoch": Case(1, dealt()),
    "at the end of an epoch": Case(3, dealt()),
    "at the beginning of an epoch": Case(4, dealt()),
    "by SIGUSR1": Case(2, dealt(), signum=signal.SIGUSR1),
    "in backward": Case(2, dealt(), hook="on_before_optimizer_step"),
    "before a validation": Case(1, dealt(), options={"val_check_interval": 2}),
    "in a validation": Case(1, dealt(), hook="on_validation_batch_start", options={"val_check_interval": 2}),
    "in the last validation": Case(3, dealt(), hook="on_validation_batch_start"),
    "in a window": Case(4, dealt(34), module=Unnormalised, options={"accumulate_grad_batches": 3}),
    "with workers": Case(5, dealt(num_workers=2)),
    "with workers, which get the signal too": Case(1, dealt(num_workers=2), is_to_group=True),
    "with a schedule that asks for the number of steps": Case(2, dealt(), module=Estimating),
    "after a validation, with a plateau": Case(1, dealt(), module=PlateauBySteps, options={"val_check_interval": 2}),
    "by number of steps": Case(5, dealt(), options={"max_epochs": -1, "max_steps": 9}),
    "with generators of its own": Case(1, of_generators(), is_dealt=False),
    "in the uneven phase": Case(2, own(12, 5), is_dealt=False, rank=0),
    "in the uneven phase, on a joined rank": Case(3, own(12, 5), is_dealt=False, hook="on_train_batch_end"),
    "in a stream": Case(1, streams(14, 11)),
    "in the uneven phase of a stream": Case(3, streams(14, 5), rank=0),
    "manual optimization": Case(2, own(12, 5), is_dealt=False, rank=0, module=RandomAdversaries),
    "ddp_checkpoint": Case(2, dealt(), "ddp_checkpoint"),
    "ddp_checkpoint, in a stream": Case(2, streams(14, 14), "ddp_checkpoint"),
    "ddp_checkpoint, in the second epoch, with workers": Case(6, dealt(num_workers=1), "ddp_checkpoint"),
    "ddp_checkpoint, with a schedule that asks": Case(2, dealt(), "ddp_checkpoint", module=Estimating),
    "ddp_checkpoint, in a stream with a limit": Case(
        2, streams(14, 14), "ddp_checkpoint", options={"limit_train_batches": 100}
    ),
    "ddp_checkpoint, with a loader that resumes by itself": Case(2, stateful, "ddp_checkpoint"),
}


def by_steps(number: int) -> dict[str, Any]:
    return {"every_n_train_steps": number, "save_on_train_epoch_end": False}


EVERY_2 = {"val_check_interval": 2}
WINDOWS = {"module": Unnormalised}
ADVERSARIES = {"is_dealt": False, "module": RandomAdversaries}
PLATEAU = Case(0, dealt(), module=PlateauBySteps, options=EVERY_2)
# Runs that a `ModelCheckpoint` with these arguments saves at the end of an epoch, or within one where a validation or
# a step of `ReduceLROnPlateau` is due.
SAVED = {
    "end: workers": (by_steps(4), Case(0, dealt(num_workers=2))),
    "end: no validation": (by_steps(4), Case(0, dealt(), options={"limit_val_batches": 0})),
    "end: validations by steps": (
        by_steps(4), Case(0, dealt(), options={"val_check_interval": 4, "check_val_every_n_epoch": None})
    ),
    "end: a short window": (by_steps(2), Case(0, dealt(), **WINDOWS, options={"accumulate_grad_batches": 3})),
    "end: the uneven phase": (by_steps(4), Case(0, own(12, 5), is_dealt=False)),
    "end: streams": (by_steps(5), Case(0, streams(14, 5))),
    "end: streams with windows": (
        by_steps(2), Case(0, streams(14, 14), **WINDOWS, options={"accumulate_grad_batches": 4})
    ),
    "end: manual optimization": (by_steps(8), Case(0, own(12, 5), **ADVERSARIES)),
    "end: generators of the loader's own, with a worker": (
        by_steps(4), Case(0, of_generators(num_workers=1), is_dealt=False)
    ),
    "end: by number of steps": ({}, Case(0, dealt(), options={"max_epochs": -1, "max_steps": 9})),
    "end: after an epoch of streams": ({}, Case(0, streams(14, 5))),
    "end: ddp_checkpoint": (by_steps(4), Case(0, dealt(), "ddp_checkpoint")),
    "end: ddp_checkpoint, with a schedule that asks for the number of steps, and workers": (
        by_steps(4), Case(0, dealt(num_workers=1), "ddp_checkpoint", module=Estimating)
    ),
    "end: ddp_checkpoint, streams": (by_steps(5), Case(0, streams(14, 14), "ddp_checkpoint")),
    "within: before a validation, with a plateau": (by_steps(2), PLATEAU),
    "within: after a validation, with a plateau": (
        {"monitor": "val_loss", "save_on_train_epoch_end": False}, PLATEAU
    ),
    "within: windows": (
        by_steps(1), Case(0, dealt(34), **WINDOWS, options={"accumulate_grad_batches": 2, **EVERY_2})
    ),
    "within: the uneven phase": (by_steps(3), Case(0, own(12, 5), is_dealt=False, options={"val_check_interval": 3})),
    "within: streams": (by_steps(4), Case(0, streams(14, 5), options={**EVERY_2, "check_val_every_n_epoch": None})),
    "within: manual optimization": (by_steps(4), Case(0, own(12, 5), **ADVERSARIES)),
    "within: ddp_checkpoint": (by_steps(2), Case(0, dealt(), "ddp_checkpoint", options=EVERY_2)),
    "within: ddp_checkpoint, with a loader that resumes by itself": (
        by_steps(2), Case(0, stateful, "ddp_checkpoint", options=EVERY_2)
    ),
}  # fmt: skip


@dataclass
class Found:
    """What a rank has after the whole run, after the interrupted one, and after the resumed one."""

    whole: Trail
    interrupted: Trail
    resumed: Trail
    code: Any
    files: list[str]


def run_all(folder: str) -> tuple[dict[str, Found], dict[str, tuple[Trail, Trail]]]:
    """Run every case on this rank: those that a signal interrupts, and those that a callback saves."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    interrupted = {name: _run(case, Path(folder, name)) for name, case in CASES.items()}
    return interrupted, {name: _resume_saved(*case, Path(folder, name)) for name, case in SAVED.items()}


def _run(case: Case, folder: Path) -> Found:
    whole, interrupted, resumed = Trail(), Trail(), Trail()
    _fit(case, folder, Tracing(whole, None))
    code = None
    try:
        _fit(case, folder, Tracing(interrupted, case))
    except SystemExit as end:
        code = end.code
    files = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in files:
        torch.load(folder / name, weights_only=True)
    if files:
        _fit(case, folder, Tracing(resumed, None), ckpt_path="hpc")
    return Found(whole, interrupted, resumed, code, files)


def _resume_saved(options: dict[str, Any], case: Case, folder: Path) -> tuple[Trail, Trail]:
    whole, resumed = Trail(), Trail()
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, **options)
    _fit(case, folder, Tracing(whole, None), saving)
    first = min(folder.iterdir(), key=lambda path: int(path.stem.partition("=")[2].partition("-")[0]))
    _fit(case, folder, Tracing(resumed, None), ckpt_path=str(first))
    return whole, resumed


def _fit(case: Case, folder: Path, *callbacks: Callback, ckpt_path: str | None = None) -> None:
    # It deals the samples out; loaders that resume by themselves need the same.
    seed_everything(0 if ckpt_path is None or case.loader is stateful else 1, verbose=False)
    signal_handling._SIGCHLD_handler_set = False  # as in a new process: it is gone after a run with signal handlers
    own = RANK if ckpt_path is None else 100 + RANK
    random.seed(own)
    numpy.random.seed(own)
    torch.manual_seed(own)
    trainer = quiet_trainer(
        **{
            "strategy": STRATEGIES[case.strategy](),
            "devices": WORLD_SIZE,
            "precision": "64-true",
            "max_epochs": 2,
            "callbacks": list(callbacks),
            "enable_checkpointing": len(callbacks) > 1,
            "use_distributed_sampler": case.is_dealt,
            "default_root_dir": folder,
            **case.options,
        }
    )
    validation = DataLoader(list(zip(*samples(5), strict=True)), batch_size=2)
    module = case.module().double()  # Lightning would load into single precision, and convert afterwards
    loaders = [case.loader(), *([validation] if case.module is not RandomAdversaries else [])]
    trainer.fit(module, *loaders, ckpt_path=ckpt_path, weights_only=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each rank has; one launch for all cases."""
    return run_processes(run_all, 2, str(tmp_path_factory.mktemp("runs")), timeout=860)


@pytest.mark.parametrize("name", CASES)
def test_ranks_leave_after_the_same_batch_and_a_resumed_run_ends_as_the_whole_one(results, name):
    first, second = cases = [interrupted[name] for interrupted, _ in results]
    for case in cases:
        assert case.interrupted.digests, "left before its first batch"
        assert len(case.interrupted.digests) < len(case.whole.digests), "was not interrupted"
        assert case.interrupted.digests + case.resumed.digests == case.whole.digests
        assert case.interrupted.steps + case.resumed.steps == case.whole.steps
        assert case.interrupted.validated + case.resumed.validated == case.whole.validated
    assert first.interrupted.digests == second.interrupted.digests
    assert first.files == second.files == ["hpc_ckpt_1.ckpt"]
    assert first.code == second.code == 128 + CASES[name].signum


def test_random_numbers_matter(results):
    """The control: ranks draw different ones, and so does each run that does not restore them."""
    within, uneven = (results[0][0][name].whole.digests for name in ("within an epoch", "in the uneven phase"))
    assert within != uneven
    assert len(set(within)) == len(within)


@pytest.mark.parametrize("name", SAVED)
def test_a_run_that_a_callback_saves_resumes_as_the_whole_one(results, name):
    for whole, resumed in (saved[name] for _, saved in results):
        batches, validations = whole.saved
        assert 0 < batches < len(whole.digests)
        is_at_end = whole.steps[batches - 1][0] < whole.steps[batches][0]
        assert is_at_end == name.startswith("end"), "was saved somewhere else"
        assert resumed.digests == whole.digests[batches:]
        assert resumed.steps == whole.steps[batches:]
        assert resumed.validated == whole.validated[validations:]


DRAWN = 8  # steps: 6 are an epoch on two ranks


def save_in_epochs(folder: str, steps: list[int]) -> tuple[list[list[int]], list[int]]:
    """Save after some batches of the first epoch, in the second one with a sampler's generator, and in a stream.

    Returns the samples of this rank until each step, and in the second epoch.
    """
    until = [_train_on(folder, None, number)[0] for number in steps]
    _train_on(folder, None, 2, streams(*[12] * WORLD_SIZE), name="stream")
    return until, _train_on(folder, None, DRAWN, _drawn, name="drawn")[1]


def resume_in_epochs(folder: str, steps: list[int]) -> tuple[list[Any], list[int], list[str]]:
    """Resume on the ranks of this launch.

    Returns the samples of this rank in the rest of the first epoch and in the next one for each step, in the rest of
    the second epoch, and errors where resuming is not possible.
    """
    rest = [_train_on(folder, f"{folder}/{number}.ckpt", number) for number in steps]
    errors = []
    several = lambda: [DataLoader(Augmented(12), 2), DataLoader(Augmented(12), 2)]  # noqa: E731
    for loader in (streams(*[12] * WORLD_SIZE), several):
        with pytest.raises(RuntimeError) as raised:
            _train_on(folder, f"{folder}/stream.ckpt", 2, loader)
        errors.append(f"{type(raised.value).__name__}: {raised.value}")
    return rest, _train_on(folder, f"{folder}/drawn.ckpt", DRAWN, _drawn)[1], errors


def _drawn() -> DataLoader:
    """A loader whose sampler has a generator that differs between ranks, and advances."""
    generator = torch.Generator().manual_seed(RANK)
    sampler = WeightedRandomSampler([1.0] * 31, 31, replacement=False, generator=generator)
    return DataLoader(Augmented(31), batch_size=3, sampler=sampler)


def _train_on(
    folder: str, ckpt_path: str | None, steps: int, loader: Callable[[], Any] | None = None, name: str | None = None
) -> tuple[list[int], list[int]]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seed_everything(0 if ckpt_path is None else 1, verbose=False)
    module = Unnormalised()  # a batch may have one sample
    by_epoch: dict[int, list[int]] = {0: [], 1: []}

    class Collect(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            by_epoch[trainer.current_epoch].extend(module.seen)
            module.seen.clear()

    saving = ModelCheckpoint(folder, f"{name or steps}", every_n_train_steps=steps, save_top_k=-1)
    trainer = quiet_trainer(
        strategy=DDPJoinStrategy(),
        devices=WORLD_SIZE,
        precision="64-true",
        max_epochs=2,
        max_steps=-1 if ckpt_path else steps,
        callbacks=[Collect()] if ckpt_path else [Collect(), saving],
        enable_checkpointing=ckpt_path is None,
        use_distributed_sampler=True,
    )
    made = DataLoader(Augmented(31), batch_size=3, shuffle=True) if loader is None else loader()
    trainer.fit(module, made, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return by_epoch[0], by_epoch[1]


# In batches of 3: two ranks have 16 and 15 samples, three have 11 and 10. The last steps end an epoch, and fewer ranks,
# whose epochs have more batches than the one that was saved, begin the next one.
@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "steps"), [(2, 3, [1, 4, 5, 6]), (3, 2, [4])])
def test_another_number_of_ranks_shares_the_rest_of_an_epoch_but_not_of_streams(before, after, steps, tmp_path):
    saved = run_processes(save_in_epochs, before, str(tmp_path), steps, timeout=240)
    resumed = run_processes(resume_in_epochs, after, str(tmp_path), steps, timeout=240)
    everything = list(range(31))
    for number, step in enumerate(steps):
        until = [index for by_step, _ in saved for index in by_step[number]]
        rest = [index for by_step, *_ in resumed for index in by_step[number][0]]
        following = [index for by_step, *_ in resumed for index in by_step[number][1]]
        assert until
        assert bool(rest) == (step != steps[-1])
        assert sorted(until + rest) == sorted(following) == everything
    drawn = [*(drawn for _, drawn in saved), *(drawn for _, drawn, _ in resumed)]
    assert before > after or all(drawn[:before])
    assert before > after or sorted(index for by_rank in drawn for index in by_rank) == everything
    for message in (message for *_, messages in resumed for message in messages):
        assert f"UnsupportedFeatureError: the checkpoint was saved by {before} ranks in the middle of an ep" in message
        assert f"Resume on {before} ranks" in message

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

pytestmark = pytest.mark.timeout(600)

# With 22 samples on two ranks in batches of 3, an epoch has 4 batches.
CASES = {
    "within an epoch": Case(1, dealt()),
    "at the end of an epoch": Case(3, dealt()),
    "at the beginning of an epoch": Case(4, dealt()),
    "in the second epoch": Case(6, dealt()),
    "by SIGUSR1": Case(2, dealt(), signum=signal.SIGUSR1),
    "in backward": Case(2, dealt(), hook="on_before_optimizer_step"),
    "after a batch": Case(2, dealt(), hook="on_train_batch_end"),
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
    "with generators of its own, at the end of an epoch": Case(3, of_generators(), is_dealt=False),
    "in the uneven phase": Case(2, own(12, 5), is_dealt=False, rank=0),
    "in the uneven phase, on a joined rank": Case(3, own(12, 5), is_dealt=False, hook="on_train_batch_end"),
    "in a stream": Case(1, streams(14, 11)),
    "in the uneven phase of a stream": Case(3, streams(14, 5), rank=0),
    "in a stream, at the end of an epoch": Case(4, streams(14, 5), rank=0),
    "manual optimization": Case(2, own(12, 5), is_dealt=False, rank=0, module=RandomAdversaries),
    "ddp_checkpoint": Case(2, dealt(), "ddp_checkpoint"),
    "ddp_checkpoint, at the end of an epoch": Case(3, dealt(), "ddp_checkpoint"),
    "ddp_checkpoint, in a stream": Case(2, streams(14, 14), "ddp_checkpoint"),
    "ddp_checkpoint, with workers": Case(1, dealt(num_workers=1), "ddp_checkpoint"),
    "ddp_checkpoint, in the second epoch, with workers": Case(6, dealt(num_workers=1), "ddp_checkpoint"),
    "ddp_checkpoint, with a schedule that asks": Case(2, dealt(), "ddp_checkpoint", module=Estimating),
    "ddp_checkpoint, in a stream with a limit": Case(
        2, streams(14, 14), "ddp_checkpoint", options={"limit_train_batches": 100}
    ),
    "ddp_checkpoint, with a loader that resumes by itself": Case(2, stateful, "ddp_checkpoint"),
}


AFTER_VALIDATION = {"monitor": "val_loss", "save_on_train_epoch_end": False}


def by_steps(number: int) -> dict[str, Any]:
    return {"every_n_train_steps": number, "save_on_train_epoch_end": False}


# Runs that a `ModelCheckpoint` with these arguments saves at the end of an epoch.
SAVED = {
    "a loader with workers": (by_steps(4), Case(0, dealt(num_workers=2))),
    "no validation": (by_steps(4), Case(0, dealt(), options={"limit_val_batches": 0})),
    "validations by steps": (
        by_steps(4),
        Case(0, dealt(), options={"val_check_interval": 4, "check_val_every_n_epoch": None}),
    ),
    "a window that is short": (
        by_steps(2),
        Case(0, dealt(), module=Unnormalised, options={"accumulate_grad_batches": 3}),
    ),
    "the uneven phase": (by_steps(4), Case(0, own(12, 5), is_dealt=False)),
    "streams": (by_steps(5), Case(0, streams(14, 5))),
    "streams with windows": (
        by_steps(2),
        Case(0, streams(14, 14), module=Unnormalised, options={"accumulate_grad_batches": 4}),
    ),
    "manual optimization": (by_steps(8), Case(0, own(12, 5), is_dealt=False, module=RandomAdversaries)),
    "generators of the loader's own, with a worker": (
        by_steps(4),
        Case(0, of_generators(num_workers=1), is_dealt=False),
    ),
    "after an epoch, by number of steps": ({}, Case(0, dealt(), options={"max_epochs": -1, "max_steps": 9})),
    "after an epoch of streams": ({}, Case(0, streams(14, 5))),
    "ddp_checkpoint": (by_steps(4), Case(0, dealt(), "ddp_checkpoint")),
    "ddp_checkpoint, with a schedule that asks for the number of steps, and workers": (
        by_steps(4),
        Case(0, dealt(num_workers=1), "ddp_checkpoint", module=Estimating),
    ),
    "ddp_checkpoint, streams": (by_steps(5), Case(0, streams(14, 14), "ddp_checkpoint")),
}

# Runs that a `ModelCheckpoint` with these arguments saves within an epoch, where a validation or a step of
# `ReduceLROnPlateau` is due.
SAVED_WITHIN = {
    "before a validation, with a plateau": (
        by_steps(2),
        Case(0, dealt(), module=PlateauBySteps, options={"val_check_interval": 2}),
    ),
    "after a validation, with a plateau": (
        AFTER_VALIDATION,
        Case(0, dealt(), module=PlateauBySteps, options={"val_check_interval": 2}),
    ),
    "in windows": (
        by_steps(1),
        Case(0, dealt(34), module=Unnormalised, options={"accumulate_grad_batches": 2, "val_check_interval": 2}),
    ),
    "in the uneven phase": (by_steps(3), Case(0, own(12, 5), is_dealt=False, options={"val_check_interval": 3})),
    "streams": (
        by_steps(4),
        Case(0, streams(14, 5), options={"val_check_interval": 2, "check_val_every_n_epoch": None}),
    ),
    "manual optimization": (by_steps(4), Case(0, own(12, 5), is_dealt=False, module=RandomAdversaries)),
    "ddp_checkpoint": (by_steps(2), Case(0, dealt(), "ddp_checkpoint", options={"val_check_interval": 2})),
    "ddp_checkpoint, with a loader that resumes by itself": (
        by_steps(2),
        Case(0, stateful, "ddp_checkpoint", options={"val_check_interval": 2}),
    ),
}


@dataclass
class Found:
    """What a rank has after the whole run, after the interrupted one, and after the resumed one."""

    whole: Trail
    interrupted: Trail
    resumed: Trail
    code: Any
    files: list[str]


def run_all(folder: str) -> dict[str, Found]:
    """Run every case on this rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return {name: _run(case, Path(folder, name)) for name, case in CASES.items()}


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


def run_saved(folder: str) -> dict[str, tuple[Trail, Trail]]:
    """Run every case that a callback saves: what the whole run has left, and the resumed one."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return {
        f"{place}: {name}": _resume_saved(options, case, Path(folder, place, name))
        for place, cases in (("end", SAVED), ("within", SAVED_WITHIN))
        for name, (options, case) in cases.items()
    }


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
def found(tmp_path_factory):
    """What each rank has; one launch for all cases."""
    return run_processes(run_all, 2, str(tmp_path_factory.mktemp("runs")), timeout=500)


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_leaves_and_resumes_ends_as_the_whole_one(found, name):
    for by_name in found:
        case = by_name[name]
        assert case.interrupted.digests, "left before its first batch"
        assert len(case.interrupted.digests) < len(case.whole.digests), "was not interrupted"
        assert case.interrupted.digests + case.resumed.digests == case.whole.digests
        assert case.interrupted.steps + case.resumed.steps == case.whole.steps
        assert case.interrupted.validated + case.resumed.validated == case.whole.validated


@pytest.mark.parametrize("name", CASES)
def test_ranks_leave_after_the_same_batch_with_one_checkpoint(found, name):
    first, second = (by_name[name] for by_name in found)
    assert first.interrupted.digests == second.interrupted.digests
    assert first.files == second.files == ["hpc_ckpt_1.ckpt"]
    assert first.code == second.code == 128 + CASES[name].signum


def test_random_numbers_matter(found):
    """The control: ranks draw different ones, and so does each run that does not restore them."""
    assert found[0]["within an epoch"].whole.digests != found[0]["in the uneven phase"].whole.digests
    assert len(set(found[0]["within an epoch"].whole.digests)) == len(found[0]["within an epoch"].whole.digests)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return run_processes(run_saved, 2, str(tmp_path_factory.mktemp("saved")), timeout=300)


PLACES = [f"end: {name}" for name in SAVED] + [f"within: {name}" for name in SAVED_WITHIN]


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_a_callback_saves_resumes_as_the_whole_one(saved, place):
    for whole, resumed in (by_place[place] for by_place in saved):
        batches, validations = whole.saved
        assert 0 < batches < len(whole.digests)
        is_at_end = whole.steps[batches - 1][0] < whole.steps[batches][0]
        assert is_at_end == place.startswith("end"), "was saved somewhere else"
        assert resumed.digests == whole.digests[batches:]
        assert resumed.steps == whole.steps[batches:]
        assert resumed.validated == whole.validated[validations:]


def save_within_an_epoch(folder: str, steps: list[int]) -> list[list[int]]:
    """Save after some batches of an epoch; returns the samples of this rank until then."""
    return [_train_on(folder, None, number)[0] for number in steps]


def resume_on_others(folder: str, steps: list[int]) -> list[Any]:
    """Resume on the ranks of this launch; returns the samples of this rank in the rest of the epoch and in the next."""
    return [_train_on(folder, f"{folder}/{number}.ckpt", number) for number in steps]


DRAWN = 8  # steps: 6 are an epoch on two ranks


def save_what_is_drawn(folder: str) -> list[int]:
    """Save in the second epoch of a sampler with a generator of its own; returns the samples of this rank in it."""
    return _train_on(folder, None, DRAWN, _drawn, name="drawn")[1]


def resume_what_is_drawn(folder: str) -> list[int]:
    """Resume on the ranks of this launch; returns the samples of this rank in the rest of the epoch."""
    return _train_on(folder, f"{folder}/drawn.ckpt", DRAWN, _drawn)[1]


def _drawn() -> DataLoader:
    generator = torch.Generator().manual_seed(RANK)
    sampler = WeightedRandomSampler([1.0] * 31, 31, replacement=False, generator=generator)
    return DataLoader(Augmented(31), batch_size=3, sampler=sampler)


def refuse_on_others(folder: str) -> list[str]:
    """Resume where that is not possible."""
    found = []
    for loader in (streams(12, 12, 12), lambda: [DataLoader(Augmented(12), 2), DataLoader(Augmented(12), 2)]):
        try:
            _train_on(folder, f"{folder}/stream.ckpt", 2, loader)
            found.append("")
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def save_streams(folder: str) -> None:
    """Save within an epoch of a stream."""
    _train_on(folder, None, 2, streams(12, 12), name="stream")


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


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Samples by rank until an epoch is interrupted on two ranks, and when three resume it."""
    folder = str(tmp_path_factory.mktemp("others"))
    steps = [1, 4, 5, 6]  # the ranks have 16 and 15 samples, in batches of 3; 6 is the last one
    before = run_processes(save_within_an_epoch, 2, folder, steps, timeout=120)
    run_processes(save_streams, 2, folder, timeout=120)
    after = run_processes(resume_on_others, 3, folder, steps, timeout=120)
    refused = run_processes(refuse_on_others, 3, folder, timeout=120)
    return steps, before, after, refused


@pytest.mark.slow
def test_what_is_left_of_an_epoch_is_dealt_out_on_another_number_of_ranks(others):
    steps, before, after, _ = others
    for number in range(len(steps)):
        until = [index for by_rank in before for index in by_rank[number]]
        rest = [index for by_rank in after for index in by_rank[number][0]]
        assert sorted(until + rest) == list(range(31))
        assert until
        assert bool(rest) == (steps[number] < 6)
        following = [index for by_rank in after for index in by_rank[number][1]]
        assert sorted(following) == list(range(31))


@pytest.mark.slow
def test_fewer_ranks_begin_the_next_epoch_after_the_last_batch(tmp_path):
    """Their epochs have more batches than the one that was saved."""
    last = [4]  # of 11 and 10 samples
    before = run_processes(save_within_an_epoch, 3, str(tmp_path), last, timeout=120)
    assert sorted(index for by_rank in before for index in by_rank[0]) == list(range(31))
    after = run_processes(resume_on_others, 2, str(tmp_path), last, timeout=120)
    assert [rest for ((rest, _),) in after] == [[], []]
    assert sorted(index for ((_, following),) in after for index in following) == list(range(31))


@pytest.mark.slow
def test_more_ranks_go_on_with_what_a_sampler_has_drawn(tmp_path):
    """Its generator is another one on each rank, and has advanced."""
    before = run_processes(save_what_is_drawn, 2, str(tmp_path), timeout=120)
    after = run_processes(resume_what_is_drawn, 3, str(tmp_path), timeout=120)
    assert all(before)
    assert sorted(index for by_rank in (*before, *after) for index in by_rank) == list(range(31))


@pytest.mark.slow
def test_streams_and_several_loaders_refuse_another_number_of_ranks(others):
    for by_rank in others[3]:
        for message in by_rank:
            assert "UnsupportedFeatureError: the checkpoint was saved by 2 ranks in the middle of an epoch" in message
            assert "Resume on 2 ranks" in message

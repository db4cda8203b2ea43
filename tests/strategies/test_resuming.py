"""A run that ends on a signal, or is saved by a callback in any hook, resumes as if nothing had happened.

Two ranks run every case of `CASES`: as a whole, until it ends or is saved, and resumed with other random numbers.
"""

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from tests.strategies.toolkit import (
    CLASSES,
    FEATURES,
    RANK,
    STRATEGIES,
    Adversaries,
    Classifier,
    Stream,
    Trace,
    fit,
    part_of_a_run,
    run_on_ranks,
    samples,
    selected,
    trainer,
    values_of,
    with_slow,
)

pytestmark = pytest.mark.timeout(900)


# ---------------------------------------------------------------- data and modules that draw random numbers


class Augmented(Dataset):
    """Samples with noise, drawn when they are fetched: from every generator of the process, or from two others."""

    def __init__(self, number: int, has_generators: bool = False) -> None:
        self.samples = samples(number)
        self.generators = (random.Random(RANK), numpy.random.default_rng(RANK)) if has_generators else None

    def __len__(self) -> int:
        return len(self.samples[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        features, labels, indices = (part[index] for part in self.samples)
        if self.generators is None:
            noise = torch.randn(FEATURES) + random.gauss(0.0, 1.0) + numpy.random.standard_normal()
        else:
            noise = self.generators[0].gauss(0.0, 1.0) + self.generators[1].standard_normal()
        return features + 0.1 * noise, labels, indices


def dealt(number: int = 22, **options: Any) -> DataLoader:
    """Samples that the strategy distributes; of 22, each of two ranks has four batches."""
    return DataLoader(Augmented(number), batch_size=3, shuffle=True, **options)


def own(*numbers: int) -> DataLoader:
    """This rank's samples, of known length."""
    return DataLoader(Augmented(numbers[RANK]), batch_size=3)


def stream(*numbers: int) -> DataLoader:
    return DataLoader(Stream(Augmented(numbers[RANK])), batch_size=3)


def with_a_generator_of_the_dataset(*numbers: int, is_stream: bool = False) -> DataLoader:
    """This rank's samples; their noise does not come from the generators of the process, and they have one order."""
    data = Augmented(numbers[RANK], True)
    return DataLoader(Stream(data) if is_stream else data, batch_size=3)


def with_generators(**options: Any) -> DataLoader:
    """This rank's samples; neither their order nor their noise comes from the generators of the process."""
    generator = torch.Generator().manual_seed(RANK)
    return DataLoader(Augmented(11, True), batch_size=3, shuffle=True, generator=generator, **options)


class StatefulLoader(DataLoader):
    """Resumes by itself, as torchdata's does."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        return self.count(super().__iter__(), self.position)  # draws a random number at once

    def count(self, batches: Iterator[Any], skip: int) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number >= skip:
                self.position = number + 1
                yield batch
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def stateful() -> StatefulLoader:
    return StatefulLoader(list(zip(*samples(22), strict=True)), batch_size=3)


class Random(Classifier):
    """Draws random numbers in its step; has a schedule of steps, and one of validations."""

    def __init__(self, is_normalised: bool = True) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(8) if is_normalised else nn.Identity()  # ranks differ in buffers within a window
        self.network = nn.Sequential(nn.Linear(FEATURES, 8), norm, nn.Dropout(0.3), nn.Linear(8, CLASSES))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return [optimizer], [
            {"scheduler": schedule, "interval": "step"},
            {"scheduler": plateau, "monitor": "val_loss", "strict": False},
        ]


class Estimating(Random):
    """Asks how many steps there will be, as schedules with a warm-up do: that sets up the data early."""

    def configure_optimizers(self) -> Any:
        optimizer = Classifier.configure_optimizers(self)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class PlateauBySteps(Random):
    """Lowers its learning rate after every validation."""

    def configure_optimizers(self) -> Any:
        optimizer = Classifier.configure_optimizers(self)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        schedule = {"scheduler": plateau, "monitor": "val_loss", "strict": False, "interval": "step", "frequency": 2}
        return [optimizer], [schedule]


class CutShort(Random):
    """Its first epoch ends before its third batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 2 else None

    configure_optimizers = Classifier.configure_optimizers


Unnormalised = partial(Random, is_normalised=False)


# ---------------------------------------------------------------- ends of runs


@dataclass(frozen=True)
class Signal:
    """Ends a run: `rank` gets the signal in a hook after some batches."""

    after: int
    hook: str = "on_train_batch_start"
    rank: int = 1
    signum: signal.Signals = signal.SIGTERM
    is_to_group: bool = False  # the workers of loaders receive it too


@dataclass(frozen=True)
class Saved:
    """Saves a checkpoint the first time that a hook is called after some batches of an epoch."""

    hook: str
    batches: int


def by_steps(number: int) -> dict[str, Any]:
    """Arguments of a `ModelCheckpoint`."""
    return {"every_n_train_steps": number, "save_on_train_epoch_end": False}


@dataclass(frozen=True)
class Case:
    """A run, and the checkpoint from which it resumes."""

    end: Signal | Saved | dict[str, Any]  # of a `ModelCheckpoint`
    loader: Callable[[], Any] = dealt
    strategy: str = "ddp_join"
    module: Callable[[], LightningModule] = Random
    options: dict[str, Any] = field(default_factory=dict)  # of the Trainer
    is_dealt: bool = True  # whether the strategy distributes the samples
    resumed_by: str = ""  # another strategy
    again: Saved | None = None  # the resumed run is saved, and resumed in turn
    prefetch: int = 0  # batches that a thread fetches ahead
    is_exact: bool = True  # otherwise only steps and validations are the same


EVERY_2 = {"val_check_interval": 2}
BY_STEPS = {"val_check_interval": 2, "check_val_every_n_epoch": None}
STEPS_ONLY = {"max_epochs": -1, "max_steps": 9}
UNEVEN: dict[str, Any] = {"loader": partial(own, 12, 5), "is_dealt": False}  # four batches and two
STREAMS = partial(stream, 14, 5)


def window(number: int, **options: Any) -> dict[str, Any]:
    return {"module": Unnormalised, "options": {"accumulate_grad_batches": number, **options}}


class RandomAdversaries(Adversaries):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


CASES = {
    "signal: within an epoch": Case(Signal(1)),
    "signal: at the end of an epoch": Case(Signal(3)),
    "signal: at the beginning of an epoch": Case(Signal(4)),
    "signal: SIGUSR1, in backward": Case(Signal(2, "on_before_optimizer_step", signum=signal.SIGUSR1)),
    "signal: in a validation": Case(Signal(1, "on_validation_batch_start"), options=EVERY_2),
    "signal: in the last validation": Case(Signal(3, "on_validation_batch_start")),
    "signal: in a window": Case(Signal(4), partial(dealt, 34), **window(3)),
    "signal: to workers too": Case(Signal(5, is_to_group=True), partial(dealt, num_workers=2)),
    "signal: a schedule that asks for the number of steps": Case(Signal(2), module=Estimating),
    "signal: after a validation, with a plateau": Case(Signal(1), module=PlateauBySteps, options=EVERY_2),
    "signal: by number of steps": Case(Signal(5), options=STEPS_ONLY),
    "signal: generators of the loader": Case(Signal(1), with_generators, is_dealt=False),
    "signal: prefetched": Case(Signal(1), with_generators, is_dealt=False, prefetch=2),
    "signal: prefetched, in the uneven phase": Case(
        Signal(2, rank=0), partial(with_a_generator_of_the_dataset, 17, 8), is_dealt=False, prefetch=3
    ),
    "signal: prefetched streams": Case(
        Signal(3, rank=0), partial(with_a_generator_of_the_dataset, 17, 8, is_stream=True), prefetch=2
    ),
    "end: prefetched, from workers": Case(
        by_steps(4), partial(dealt, num_workers=1), "ddp_checkpoint", prefetch=2
    ),
    "within: prefetched, with validations": Case(
        by_steps(2), with_generators, "ddp_checkpoint", is_dealt=False, options=EVERY_2, prefetch=1
    ),
    "within: prefetched streams": Case(
        by_steps(2), partial(with_a_generator_of_the_dataset, 17, 17, is_stream=True), "ddp_checkpoint",
        options=BY_STEPS, prefetch=2,
    ),
    "signal: in the uneven phase": Case(Signal(2, rank=0), **UNEVEN),
    "signal: in the uneven phase, on a joined rank": Case(Signal(3, "on_train_batch_end"), **UNEVEN),
    "signal: in the uneven phase of a stream": Case(Signal(3, rank=0), STREAMS),
    "signal: manual optimization": Case(Signal(2, rank=0), module=RandomAdversaries, **UNEVEN),
    "signal: ddp_checkpoint, second epoch, workers": Case(
        Signal(6), partial(dealt, num_workers=1), "ddp_checkpoint", Estimating
    ),
    "signal: ddp_checkpoint, a stream with a limit": Case(
        Signal(2), partial(stream, 14, 14), "ddp_checkpoint", options={"limit_train_batches": 100}
    ),
    "signal: ddp_checkpoint, a loader that resumes by itself": Case(Signal(2), stateful, "ddp_checkpoint"),
    "end: no validation": Case(by_steps(4), options={"limit_val_batches": 0}),
    "end: validations by steps": Case(
        by_steps(4), options={"val_check_interval": 4, "check_val_every_n_epoch": None}
    ),
    "end: a short window": Case(by_steps(2), **window(3)),
    "end: the uneven phase": Case(by_steps(4), **UNEVEN),
    "end: streams with windows": Case(by_steps(2), partial(stream, 14, 14), **window(4)),
    "end: manual optimization": Case(by_steps(8), module=RandomAdversaries, **UNEVEN),
    "end: generators of the loader, a worker": Case(
        by_steps(4), partial(with_generators, num_workers=1), is_dealt=False
    ),
    "end: by number of steps": Case({}, options=STEPS_ONLY),
    "end: after an epoch of streams": Case({}, STREAMS),
    "end: ddp_checkpoint, number of steps, workers": Case(
        by_steps(4), partial(dealt, num_workers=1), "ddp_checkpoint", Estimating
    ),
    "end: ddp_checkpoint, streams": Case(by_steps(5), partial(stream, 14, 14), "ddp_checkpoint"),
    "within: before a validation, with a plateau": Case(by_steps(2), module=PlateauBySteps, options=EVERY_2),
    "within: after a validation, with a plateau": Case(
        {"monitor": "val_loss", "save_on_train_epoch_end": False}, module=PlateauBySteps, options=EVERY_2
    ),
    "within: windows": Case(by_steps(1), partial(dealt, 34), **window(2, **EVERY_2)),
    "within: the uneven phase": Case(by_steps(3), **UNEVEN, options={"val_check_interval": 3}),
    "within: streams": Case(by_steps(4), STREAMS, options=BY_STEPS),
    "within: ddp_checkpoint": Case(by_steps(2), strategy="ddp_checkpoint", options=EVERY_2),
    "within: ddp_checkpoint, a loader that resumes by itself": Case(
        by_steps(2), stateful, "ddp_checkpoint", options=EVERY_2
    ),
    "within: ddp_checkpoint, resumed by ddp_join": Case(
        Saved("on_train_batch_end", 2), strategy="ddp_checkpoint", resumed_by="ddp_join"
    ),
    "within: ddp_join, resumed by ddp_checkpoint": Case(
        Saved("on_train_batch_end", 2), resumed_by="ddp_checkpoint"
    ),
}  # fmt: skip
for name in STRATEGIES:
    for hook, batches in (
        ("on_train_batch_end", 2), ("on_train_batch_end", 4), ("on_validation_end", 2), ("on_validation_end", 4),
        ("on_train_epoch_end", 4),
    ):  # fmt: skip
        CASES[f"{'end' if batches == 4 else 'within'}: {name}, {hook}, and again"] = Case(
            Saved(hook, batches), strategy=name, options=BY_STEPS,
            again=Saved("on_validation_end", batches if hook == "on_train_batch_end" else 2),
        )  # fmt: skip
    CASES[f"end: {name}, an epoch that was cut short"] = Case(
        Saved("on_train_epoch_end", 3), strategy=name, module=CutShort, options={"limit_val_batches": 0}
    )
    for hook in ("on_validation_start", "on_validation_batch_end", "on_validation_epoch_end"):
        CASES[f"within: {name}, {hook}, validated again"] = Case(
            Saved(hook, 2), strategy=name, options=EVERY_2, is_exact=False
        )


CONTROL = {"signal: within an epoch", "signal: in the uneven phase"}


# ---------------------------------------------------------------- runs on a rank


class Trail(Trace):
    """Notes where the first checkpoint was saved."""

    saved: tuple[int, int] | None = None  # batches and validations until then

    def on_save_checkpoint(self, *_: Any) -> None:
        self.saved = self.saved or (len(self.digests), len(self.validations))

    def record(self, batches: int | None = None, validations: int | None = None) -> tuple[list[Any], list[Any]]:
        """Return the state after each batch, and the validations, or the first of them."""
        return list(zip(self.digests, self.steps, strict=True))[:batches], self.validations[:validations]


class Sending(Callback):
    """Sends the signal of a case, once."""

    def __init__(self, end: Signal, trail: Trail) -> None:
        self.end, self.trail = end, trail
        if end.rank == RANK:
            setattr(self, end.hook, self.send)

    def send(self, *_: Any) -> None:
        batches = len(self.trail.digests) - (self.end.hook == "on_train_batch_end")
        if batches < self.end.after:
            return
        setattr(self, self.end.hook, lambda *_: None)
        if self.end.is_to_group:  # by another process: a worker tells a signal of its parent from one of a stranger
            command = ["kill", f"-{self.end.signum.value}", "--", f"-{os.getpgid(0)}"]
            subprocess.run(command, check=False)
        else:
            os.kill(os.getpid(), self.end.signum)


class Saving(Callback):
    def __init__(self, end: Saved, path: str) -> None:
        self.batches, self.path, self.is_done = end.batches, path, False
        setattr(self, end.hook, self.save)

    def save(self, trainer: Trainer, *_: Any) -> None:
        used = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if not self.is_done and not trainer.sanity_checking and used == self.batches:
            self.is_done = True
            trainer.save_checkpoint(self.path)


def train(case: Case, trail: Trail, *callbacks: Callback, path: Any = None, folder: Any = None) -> Trail:
    """Train this case on this rank, with other random numbers than before if it resumes."""
    # It deals the samples out; loaders that resume by themselves need the same.
    seed_everything(0 if path is None or case.loader is stateful else 1, verbose=False)
    signal_handling._SIGCHLD_handler_set = False  # as in a new process: it is gone after a run with signal handlers
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(RANK if path is None else 100 + RANK)
    options = {
        "strategy": STRATEGIES[case.strategy if path is None else case.resumed_by or case.strategy](
            prefetch=case.prefetch
        ),
        "max_epochs": 2,
        "num_sanity_val_steps": 2,
        "callbacks": [trail, *callbacks],
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "use_distributed_sampler": case.is_dealt,
        "default_root_dir": folder,
        **case.options,
    }
    module = case.module().double()  # Lightning would load into single precision, and convert afterwards
    validation = DataLoader(list(zip(*samples(6), strict=True)), batch_size=2)
    trainer(**options).fit(module, case.loader(), validation, ckpt_path=path)
    return trail


def run(case: Case, name: str, folder: str) -> tuple[list[Any], Any, list[str]]:
    """Run a case on this rank; returns whole run, run until the checkpoint and resumed run, exit code and files."""
    place, whole = Path(folder, name.replace(" ", "_")), Trail()
    if isinstance(case.end, Signal):
        train(case, whole, folder=place)
        before = Trail()
        with pytest.raises(SystemExit) as end:
            train(case, before, Sending(case.end, before), folder=place)
        files = sorted(path.name for path in place.iterdir())
        resumed = train(case, Trail(), path="hpc", folder=place)
        return [(whole.record(), before.record(), resumed.record())], end.value.code, files
    saving = (
        Saving(case.end, f"{place}/first.ckpt")
        if isinstance(case.end, Saved)
        else ModelCheckpoint(place, "{step}", save_top_k=-1, **case.end)
    )
    train(case, whole, saving, folder=place)
    first = min(place.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    again = [Saving(case.again, f"{place}/again.ckpt")] if case.again else []
    resumed = train(case, Trail(), *again, path=first, folder=place)
    runs = [(whole, resumed)]
    if case.again:
        runs.append((resumed, train(case, Trail(), path=f"{place}/again.ckpt", folder=place)))
    return [(one.record(), one.record(*one.saved), after.record()) for one, after in runs], None, []


# The others are slow.
QUICK = {
    "signal: within an epoch", "signal: in a window", "signal: in the uneven phase", "signal: manual optimization",
    "signal: prefetched, in the uneven phase", "signal: ddp_checkpoint, second epoch, workers", "end: a short window",
    "end: the uneven phase", "within: windows", "within: the uneven phase", "within: streams", "within: ddp_checkpoint",
    "within: ddp_checkpoint, resumed by ddp_join",
    *(f"within: {name}, on_train_batch_end, and again" for name in STRATEGIES),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    chosen = selected(request, "name") | CONTROL
    cases = {name: partial(run, case, name) for name, case in CASES.items() if name in chosen}
    return run_on_ranks(2, cases, tmp_path_factory.mktemp("runs"), timeout=860)


def without_values(batches, validations):
    return [steps for _, steps in batches], [step for step, _ in validations]


@pytest.mark.parametrize("name", with_slow(CASES, QUICK))
def test_a_resumed_run_ends_as_the_whole_one(found, name):
    case, by_rank = CASES[name], values_of(found, name)
    for runs, _, _ in by_rank:
        for records in runs:
            kept = records if case.is_exact else [without_values(*record) for record in records]
            whole, before, after = kept
            assert len(before[0]) < len(whole[0])
            assert (before[0] + after[0], before[1] + after[1]) == whole
        (whole, before, _), *_ = runs
        assert before[0], "ended before its first batch"
        (_, (epoch, *_)), (_, (next_epoch, *_)) = whole[0][len(before[0]) - 1 : len(before[0]) + 1]
        assert name.startswith("signal") or (epoch < next_epoch) == name.startswith("end"), "was saved somewhere else"
    if isinstance(case.end, Signal):
        (((_, first, _),), code, files), (((_, second, _),), *others) = by_rank
        assert [digest for digest, _ in first[0]] == [digest for digest, _ in second[0]]
        assert [code, files] == others == [128 + case.end.signum, ["hpc_ckpt_1.ckpt"]]


def test_random_numbers_matter(found):
    """The control: ranks draw different ones, and so does each run that does not restore them."""
    within, uneven = ([digest for digest, _ in values_of(found, name)[0][0][0][0][0]] for name in sorted(CONTROL))
    assert within != uneven
    assert len(set(within)) == len(within)


# ---------------------------------------------------------------- one rank


class LateValue(Random):
    """Logs the value of one of its schedules after callbacks have saved."""

    def on_train_epoch_end(self):
        self.log("late", 1.0, sync_dist=True)

    def configure_optimizers(self):
        (optimizer,), schedules = super().configure_optimizers()
        late = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": late, "monitor": "late"}, {**schedules[1], "strict": True}]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_schedule_whose_value_is_not_there_yet_is_skipped_with_a_warning(strategy, tmp_path):
    case = Case({}, partial(dealt, 11), strategy, LateValue)
    whole, resumed, path = Trail(), Trail(), f"{tmp_path}/1.ckpt"
    epochs = []
    whole.on_train_end = resumed.on_train_end = lambda trainer, module: epochs.append(
        [(config.scheduler.last_epoch, config.strict) for config in trainer.lr_scheduler_configs]
    )
    train(case, whole, Saving(Saved("on_train_epoch_end", 4), path))
    with pytest.warns(RuntimeWarning, match="ReduceLROnPlateau conditioned on metric late which is not available"):
        train(case, resumed, path=path)
    assert resumed.steps == whole.steps[4:]
    assert epochs == [[(2, True), (2, True)], [(1, True), (2, True)]]


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric val_loss")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_trainer_that_has_fitted_before_resumes(strategy, tmp_path):
    whole, resumed, path = Trail(), Trail(), f"{tmp_path}/1.ckpt"
    saving = Saving(Saved("on_train_batch_end", 4), path)
    made = trainer(whole, saving, strategy=strategy, max_epochs=2, use_distributed_sampler=True)
    for trail, ckpt_path in ((whole, None), (resumed, path)):
        made.callbacks[0] = trail
        seed_everything(0 if ckpt_path is None else 1, verbose=False)
        made.fit(Random().double(), dealt(11), ckpt_path=ckpt_path)
    assert resumed.digests == whole.digests[4:] != []


class Breaking(Augmented):
    """Cannot give its seventh sample, once."""

    left = 6

    def __getitem__(self, index):
        self.left -= 1
        if self.left == -1:
            raise OSError("the file is gone")
        return super().__getitem__(index)


class SavingOnException(Callback):
    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, *_):
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_exception_while_a_batch_is_fetched_leaves_nothing_due(strategy, tmp_path):
    """Neither the validation after the second batch nor a schedule after that."""
    path, trails = f"{tmp_path}/1.ckpt", [Trail(), Trail(), Trail()]
    case = Case({}, strategy=strategy, options=EVERY_2, loader=partial(dealt, 11))
    train(case, trails[0])
    breaking = Case({}, lambda: DataLoader(Breaking(11), 3, shuffle=True), strategy, options=EVERY_2)
    with pytest.raises(OSError, match="the file is gone"):
        train(breaking, trails[1], SavingOnException(path))
    train(case, trails[2], path=path)
    whole, interrupted, resumed = (without_values(*trail.record()) for trail in trails)
    assert (interrupted[0] + resumed[0], interrupted[1] + resumed[1]) == whole


# ---------------------------------------------------------------- another number of ranks


def see(steps: int, resumes: bool, folder: str) -> list[list[int]]:
    """Train until a checkpoint is saved after a step, or from it on; returns this rank's samples in both epochs."""
    module, by_epoch = Unnormalised(), [[], []]  # a batch may have one sample

    class Collect(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            by_epoch[trainer.current_epoch].extend(module.seen)
            module.seen.clear()

    options = part_of_a_run(f"{folder}/{steps}", steps, not resumes)
    options["callbacks"] = [Collect(), *options.get("callbacks", [])]
    seed_everything(int(resumes), verbose=False)
    fit(module, dealt(31), max_epochs=2, use_distributed_sampler=True, **options)
    return by_epoch


# In batches of 3, two ranks have 16 and 15 samples: step 6 ends their epoch, and step 4 does not.
@pytest.mark.slow
def test_another_number_of_ranks_resumes_between_epochs_and_is_refused_within_one(tmp_path):
    saved = run_on_ranks(2, {name: partial(see, int(name), False) for name in "46"}, tmp_path)
    resumed = run_on_ranks(3, {name: partial(see, int(name), True) for name in "46"}, tmp_path)
    for by_rank, epoch in ((values_of(saved, "6"), 0), (values_of(resumed, "6"), 1)):
        assert sorted(index for epochs in by_rank for index in epochs[epoch]) == list(range(31))
    assert not any(epochs[0] for epochs in values_of(resumed, "6"))
    for message in resumed["4"]:
        assert "UnsupportedFeatureError: the checkpoint was saved by 2 ranks in the middle of an epoch" in message
        assert "Resume on 2 ranks" in message

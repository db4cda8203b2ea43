"""Runs that are told to end, and resumed; kept apart because every rank imports it."""

import os
import random
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import signal_handling

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy
from tests.strategies.ddp_modules import Adversaries
from tests.strategies.ddp_ranks import quiet_trainer
from tests.strategies.join_ranks import digest_of, samples

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STRATEGIES = {"ddp_checkpoint": DDPCheckpointStrategy, "ddp_join": DDPJoinStrategy}


class Augmented(Dataset):
    """Samples with noise from every generator, drawn when they are fetched."""

    def __init__(self, number: int) -> None:
        self.samples = samples(number)

    def __len__(self) -> int:
        return len(self.samples[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        noise = torch.randn(6) + random.gauss(0.0, 1.0) + numpy.random.standard_normal()
        indices, features, labels = (part[index] for part in self.samples)
        return indices, features + 0.1 * noise, labels


class AugmentedStream(IterableDataset):
    def __init__(self, number: int) -> None:
        self.samples = Augmented(number)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))


class Random(LightningModule):
    """Draws random numbers in its step, from generators that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.seen: list[int] = []

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.network(batch[1]), batch[2])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.extend(batch[0].tolist())
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return [optimizer], [
            {"scheduler": schedule, "interval": "step"},
            {"scheduler": plateau, "monitor": "val_loss", "strict": False},
        ]


class Estimating(Random):
    """Asks how many steps there will be, as schedules with a warm-up do: that sets up the data early."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class PlateauBySteps(Random):
    """Lowers its learning rate after every validation."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        schedule = {"scheduler": plateau, "monitor": "val_loss", "strict": False, "interval": "step", "frequency": 2}
        return [optimizer], [schedule]


class Unnormalised(Random):
    """Has no buffers, which ranks have of their own within an accumulation window."""

    def __init__(self) -> None:
        super().__init__()
        self.network[1] = nn.Identity()


class RandomAdversaries(Adversaries):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch[1][:, :5] if isinstance(batch, list | tuple) else batch
        return super().training_step((batch, batch), batch_idx)


@dataclass(frozen=True)
class Case:
    """A run that is told to end.

    Attributes:
        after: Batches after which the signal is sent.
        loader: Makes the training loader of this rank.
        strategy: Its name.
        hook: Where the signal is sent.
        rank: Who sends it to itself.
        is_to_group: Whether it sends it to its workers too.
        signum: The signal.
        module: Makes the module.
        is_dealt: Whether the strategy deals the samples out.
        options: Other arguments of the Trainer.
    """

    after: int
    loader: Callable[[], Any]
    strategy: str = "ddp_join"
    hook: str = "on_train_batch_start"
    rank: int = 1
    is_to_group: bool = False
    signum: signal.Signals = signal.SIGTERM
    module: Callable[[], LightningModule] = Random
    is_dealt: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def dealt(number: int = 22, **options: Any) -> Callable[[], DataLoader]:
    return lambda: DataLoader(Augmented(number), batch_size=3, shuffle=True, **options)


def own(*numbers: int) -> Callable[[], DataLoader]:
    """A loader of each rank's own, of known length."""
    return lambda: DataLoader(Augmented(numbers[RANK]), batch_size=3)


def streams(*numbers: int) -> Callable[[], DataLoader]:
    return lambda: DataLoader(AugmentedStream(numbers[RANK]), batch_size=3)


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


# With 22 samples on two ranks in batches of 3, an epoch has 4 batches.
CASES = {
    "within an epoch": Case(1, dealt()),
    "at the end of an epoch": Case(3, dealt()),
    "at the beginning of an epoch": Case(4, dealt()),
    "in the second epoch": Case(6, dealt()),
    "by rank 0": Case(2, dealt(), rank=0),
    "by SIGUSR1": Case(2, dealt(), signum=signal.SIGUSR1),
    "in backward": Case(2, dealt(), hook="on_before_optimizer_step"),
    "after a batch": Case(2, dealt(), hook="on_train_batch_end"),
    "before a validation": Case(1, dealt(), options={"val_check_interval": 2}),
    "in a validation": Case(1, dealt(), hook="on_validation_batch_start", options={"val_check_interval": 2}),
    "in the last validation": Case(3, dealt(), hook="on_validation_batch_start"),
    "in a window": Case(4, dealt(34), module=Unnormalised, options={"accumulate_grad_batches": 3}),
    "with workers": Case(5, dealt(num_workers=2)),
    "with workers, which get the signal too": Case(1, dealt(num_workers=2), is_to_group=True),
    "SIGUSR1 to workers too": Case(2, dealt(num_workers=1), is_to_group=True, signum=signal.SIGUSR1),
    "with a schedule that asks for the number of steps": Case(2, dealt(), module=Estimating),
    "after a validation, with a plateau": Case(1, dealt(), module=PlateauBySteps, options={"val_check_interval": 2}),
    "by number of steps": Case(5, dealt(), options={"max_epochs": -1, "max_steps": 9}),
    "by number of steps, at the end of an epoch": Case(3, dealt(), options={"max_epochs": -1, "max_steps": 9}),
    "in the tail": Case(2, own(12, 5), is_dealt=False, rank=0),
    "in the tail, on a joined rank": Case(3, own(12, 5), is_dealt=False, hook="on_train_batch_end"),
    "in a stream": Case(1, streams(14, 11)),
    "in the tail of a stream": Case(3, streams(14, 5), rank=0),
    "in a stream, at the end of an epoch": Case(4, streams(14, 5), rank=0),
    "manual optimization": Case(2, own(12, 5), is_dealt=False, rank=0, module=RandomAdversaries),
    "ddp_checkpoint": Case(2, dealt(), "ddp_checkpoint"),
    "ddp_checkpoint, at the end of an epoch": Case(3, dealt(), "ddp_checkpoint"),
    "ddp_checkpoint, in a stream": Case(2, streams(14, 14), "ddp_checkpoint"),
    "ddp_checkpoint, with workers": Case(1, dealt(num_workers=1), "ddp_checkpoint"),
    "ddp_checkpoint, in the second epoch": Case(6, dealt(), "ddp_checkpoint"),
    "ddp_checkpoint, in the second epoch, with workers": Case(6, dealt(num_workers=1), "ddp_checkpoint"),
    "ddp_checkpoint, with a schedule that asks": Case(2, dealt(), "ddp_checkpoint", module=Estimating),
    "ddp_checkpoint, in a stream with a limit": Case(
        2, streams(14, 14), "ddp_checkpoint", options={"limit_train_batches": 100}
    ),
    "ddp_checkpoint, with a loader that resumes by itself": Case(2, stateful, "ddp_checkpoint"),
}


@dataclass
class Trail:
    """What a run has left on a rank.

    Attributes:
        digests: Of the replica, after each batch.
        steps: Epoch and numbers of steps, after each batch.
        validated: Global step and loss of each validation.
    """

    digests: list[str] = field(default_factory=list)
    steps: list[tuple[int, ...]] = field(default_factory=list)
    validated: list[tuple[int, float]] = field(default_factory=list)


class Tracing(Callback):
    """Follows a run, and sends a signal after some batches."""

    def __init__(self, trail: Trail, case: Case | None) -> None:
        self._trail = trail
        self._case = case
        self._batches = 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self._trail.digests.append("".join(digest_of(module, optimizer) for optimizer in trainer.optimizers))
        loop = trainer.fit_loop.epoch_loop
        # The last one is what loggers count.
        counts = trainer.global_step, loop.total_batch_idx, loop._batches_that_stepped
        self._trail.steps.append((trainer.current_epoch, *counts))
        self._send("on_train_batch_end")
        self._batches += 1

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._trail.validated.append((trainer.global_step, float(trainer.callback_metrics.get("val_loss", 0.0))))

    def on_train_batch_start(self, *_: Any) -> None:
        self._send("on_train_batch_start")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._send("on_before_optimizer_step")

    def on_validation_batch_start(self, *_: Any) -> None:
        self._send("on_validation_batch_start")

    def _send(self, hook: str) -> None:
        case = self._case
        if case is not None and (hook, RANK) == (case.hook, case.rank) and self._batches >= case.after:
            self._case = None
            if case.is_to_group:
                # By another process: a worker tells a signal of its parent from one of a stranger.
                subprocess.run(["kill", f"-{case.signum.value}", "--", f"-{os.getpgid(0)}"], check=False)
            else:
                os.kill(os.getpid(), case.signum)


@dataclass
class Found:
    """What a rank has after the whole run, after the interrupted one, and after the resumed one."""

    whole: Trail
    interrupted: Trail
    resumed: Trail
    code: Any
    files: list[str]
    keys: int


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
    keys = len(torch.load(folder / files[0], weights_only=True)) if files else 0
    if files:
        _fit(case, folder, Tracing(resumed, None), ckpt_path="hpc")
    return Found(whole, interrupted, resumed, code, files, keys)


def _fit(case: Case, folder: Path, tracing: Tracing, ckpt_path: str | None = None) -> None:
    seed_everything(0, verbose=False)  # deals the samples out
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
            "callbacks": [tracing],
            "use_distributed_sampler": case.is_dealt,
            "default_root_dir": folder,
            **case.options,
        }
    )
    validation = DataLoader(list(zip(*samples(5), strict=True)), batch_size=2)
    module = case.module().double()  # Lightning would load into single precision, and convert afterwards
    loaders = [case.loader(), *([validation] if case.module is not RandomAdversaries else [])]
    trainer.fit(module, *loaders, ckpt_path=ckpt_path, weights_only=True)


def save_within_an_epoch(folder: str, steps: list[int]) -> list[list[int]]:
    """Save after some batches of an epoch; returns the samples of this rank until then."""
    return [_train_on(folder, None, number)[0] for number in steps]


def resume_on_others(folder: str, steps: list[int]) -> list[Any]:
    """Resume on the ranks of this launch; returns the samples of this rank in the rest of the epoch and in the next."""
    return [_train_on(folder, f"{folder}/{number}.ckpt", number) for number in steps]


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
    seed_everything(0, verbose=False)
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

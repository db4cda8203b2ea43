"""Data and modules that draw random numbers in every way, and records of runs that are interrupted."""

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy
from tests.strategies.ddp_modules import Adversaries
from tests.strategies.join_ranks import digest_of, samples

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


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


class AugmentedByItself(Augmented):
    """Draws from generators of its own, and fetches nothing from those of the process."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.of_python, self.of_numpy = random.Random(RANK), numpy.random.default_rng(RANK)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        indices, features, labels = (part[index] for part in self.samples)
        return indices, features + 0.1 * (self.of_python.gauss(0.0, 1.0) + self.of_numpy.standard_normal()), labels


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


def dealt(number: int = 22, **options: Any) -> Callable[[], DataLoader]:
    return lambda: DataLoader(Augmented(number), batch_size=3, shuffle=True, **options)


def own(*numbers: int) -> Callable[[], DataLoader]:
    """A loader of each rank's own, of known length."""
    return lambda: DataLoader(Augmented(numbers[RANK]), batch_size=3)


def of_generators(**options: Any) -> Callable[[], DataLoader]:
    """A loader of each rank's own, whose random numbers are not those of the process."""
    return lambda: DataLoader(
        AugmentedByItself(11), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(RANK), **options
    )


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


@dataclass(frozen=True)
class Case:
    """A run that receives a signal after some batches."""

    after: int
    loader: Callable[[], Any]  # makes the training loader of this rank
    strategy: str = "ddp_join"
    hook: str = "on_train_batch_start"  # where the signal is sent
    rank: int = 1
    is_to_group: bool = False  # whether the workers of loaders receive it too
    signum: signal.Signals = signal.SIGTERM
    module: Callable[[], LightningModule] = Random
    is_dealt: bool = True  # whether the strategy distributes the samples
    options: dict[str, Any] = field(default_factory=dict)  # of the Trainer


STRATEGIES = {"ddp_checkpoint": DDPCheckpointStrategy, "ddp_join": DDPJoinStrategy}


@dataclass
class Trail:
    """The record of a run on a rank."""

    digests: list[str] = field(default_factory=list)  # of the replica, after each batch
    steps: list[tuple[int, ...]] = field(default_factory=list)  # epoch and numbers of steps, after each batch
    validated: list[tuple[int, float]] = field(default_factory=list)  # global step and loss
    saved: tuple[int, int] | None = None  # batches and validations before the first checkpoint


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

    def on_save_checkpoint(self, *_: Any) -> None:
        trail = self._trail
        trail.saved = trail.saved or (len(trail.digests), len(trail.validated))

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

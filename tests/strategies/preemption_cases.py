"""Runs that are told to end: data, modules, and where the signal comes."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.strategies.ddp_modules import Adversaries
from tests.strategies.join_ranks import samples

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
    "with generators of its own": Case(1, of_generators(), is_dealt=False),
    "with generators of its own, in the second epoch": Case(6, of_generators(), is_dealt=False),
    "with generators of its own, at the end of an epoch": Case(3, of_generators(), is_dealt=False),
    "in the tail": Case(2, own(12, 5), is_dealt=False, rank=0),
    "in the tail, on a joined rank": Case(3, own(12, 5), is_dealt=False, hook="on_train_batch_end"),
    "in a stream": Case(1, streams(14, 11)),
    "in the tail of a stream": Case(3, streams(14, 5), rank=0),
    "in a stream, at the end of an epoch": Case(4, streams(14, 5), rank=0),
    "manual optimization": Case(2, own(12, 5), is_dealt=False, rank=0, module=RandomAdversaries),
    "ddp_checkpoint": Case(2, dealt(), "ddp_checkpoint"),
    "ddp_checkpoint, at the end of an epoch": Case(3, dealt(), "ddp_checkpoint"),
    "ddp_checkpoint, with generators of its own": Case(6, of_generators(), "ddp_checkpoint", is_dealt=False),
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


AFTER_VALIDATION = {"monitor": "val_loss", "save_on_train_epoch_end": False}


def by_steps(number: int) -> dict[str, Any]:
    return {"every_n_train_steps": number, "save_on_train_epoch_end": False}


# Runs that a `ModelCheckpoint` with these arguments saves at the end of an epoch.
SAVED = {
    "a loader": (by_steps(4), Case(0, dealt())),
    "a loader, after validation": (AFTER_VALIDATION, Case(0, dealt())),
    "a loader with workers": (by_steps(4), Case(0, dealt(num_workers=2))),
    "no validation": (by_steps(4), Case(0, dealt(), options={"limit_val_batches": 0})),
    "two validations in an epoch": (by_steps(4), Case(0, dealt(), options={"val_check_interval": 2})),
    "validations by steps": (
        by_steps(4),
        Case(0, dealt(), options={"val_check_interval": 4, "check_val_every_n_epoch": None}),
    ),
    "by number of steps": (by_steps(4), Case(0, dealt(), options={"max_epochs": -1, "max_steps": 9})),
    "a window that is short": (
        by_steps(2),
        Case(0, dealt(), module=Unnormalised, options={"accumulate_grad_batches": 3}),
    ),
    "a plateau": (by_steps(4), Case(0, dealt(), module=PlateauBySteps)),
    "the tail": (by_steps(4), Case(0, own(12, 5), is_dealt=False)),
    "streams": (by_steps(5), Case(0, streams(14, 5))),
    "streams, after validation": (AFTER_VALIDATION, Case(0, streams(14, 5))),
    "streams with windows": (
        by_steps(2),
        Case(0, streams(14, 14), module=Unnormalised, options={"accumulate_grad_batches": 4}),
    ),
    "manual optimization": (by_steps(8), Case(0, own(12, 5), is_dealt=False, module=RandomAdversaries)),
    "generators of the loader's own": (by_steps(4), Case(0, of_generators(), is_dealt=False)),
    "generators of the loader's own, with a worker": (
        by_steps(4),
        Case(0, of_generators(num_workers=1), is_dealt=False),
    ),
    "after an epoch": ({}, Case(0, dealt())),
    "after an epoch without validation": ({}, Case(0, dealt(), options={"limit_val_batches": 0})),
    "after an epoch, by number of steps": ({}, Case(0, dealt(), options={"max_epochs": -1, "max_steps": 9})),
    "after an epoch without validation, by number of steps": (
        {},
        Case(0, dealt(), options={"max_epochs": -1, "max_steps": 9, "limit_val_batches": 0}),
    ),
    "after an epoch of streams": ({}, Case(0, streams(14, 5))),
    "ddp_checkpoint, after an epoch": ({}, Case(0, dealt(), "ddp_checkpoint")),
    "ddp_checkpoint": (by_steps(4), Case(0, dealt(), "ddp_checkpoint")),
    "ddp_checkpoint, after validation": (AFTER_VALIDATION, Case(0, dealt(), "ddp_checkpoint")),
    "ddp_checkpoint, with a schedule that asks for the number of steps, and workers": (
        by_steps(4),
        Case(0, dealt(num_workers=1), "ddp_checkpoint", module=Estimating),
    ),
    "ddp_checkpoint, generators of the loader's own": (
        by_steps(4),
        Case(0, of_generators(), "ddp_checkpoint", is_dealt=False),
    ),
    "ddp_checkpoint, streams": (by_steps(5), Case(0, streams(14, 14), "ddp_checkpoint")),
}

# Runs that a `ModelCheckpoint` with these arguments saves within an epoch, where a validation or a step of
# `ReduceLROnPlateau` is due.
SAVED_WITHIN = {
    "before a validation": (by_steps(2), Case(0, dealt(), options={"val_check_interval": 2})),
    "after a validation": (AFTER_VALIDATION, Case(0, dealt(), options={"val_check_interval": 2})),
    "before a validation, with a plateau": (
        by_steps(2),
        Case(0, dealt(), module=PlateauBySteps, options={"val_check_interval": 2}),
    ),
    "after a validation, with a plateau": (
        AFTER_VALIDATION,
        Case(0, dealt(), module=PlateauBySteps, options={"val_check_interval": 2}),
    ),
    "before a validation, with workers": (
        by_steps(2),
        Case(0, dealt(num_workers=1), options={"val_check_interval": 2}),
    ),
    "in windows": (
        by_steps(1),
        Case(0, dealt(34), module=Unnormalised, options={"accumulate_grad_batches": 2, "val_check_interval": 2}),
    ),
    "in the tail": (by_steps(3), Case(0, own(12, 5), is_dealt=False, options={"val_check_interval": 3})),
    "streams": (
        by_steps(4),
        Case(0, streams(14, 5), options={"val_check_interval": 2, "check_val_every_n_epoch": None}),
    ),
    "manual optimization": (by_steps(4), Case(0, own(12, 5), is_dealt=False, module=RandomAdversaries)),
    "ddp_checkpoint": (by_steps(2), Case(0, dealt(), "ddp_checkpoint", options={"val_check_interval": 2})),
    "ddp_checkpoint, after a validation": (
        AFTER_VALIDATION,
        Case(0, dealt(), "ddp_checkpoint", options={"val_check_interval": 2}),
    ),
    "ddp_checkpoint, with a loader that resumes by itself": (
        by_steps(2),
        Case(0, stateful, "ddp_checkpoint", options={"val_check_interval": 2}),
    ),
}

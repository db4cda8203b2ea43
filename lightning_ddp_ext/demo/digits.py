"""Images of digits: model and data, with a share of the data for each rank."""

import importlib.util
import itertools
import math
import time
from collections.abc import Iterator, Sequence, Sized
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_ddp_ext._lightning import LightningModule, MisconfigurationException, OptimizerLRScheduler
from lightning_ddp_ext._validation import check_number
from lightning_ddp_ext.demo import DemoData, check_options, cosine_adamw
from lightning_ddp_ext.replicas.workers import current_replica

_CLASSES = 10
_TRAIN, _VAL = 1257, 180  # of 1797; the other 360 are for testing


class DigitsCNN(LightningModule):
    """A classifier of digits with two convolutions, the second twice as wide, and two linear layers."""

    def __init__(self, width: int = 32, learning_rate: float = 2e-3) -> None:
        super().__init__()
        check_options(width=width, learning_rate=learning_rate)
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 128),
            nn.ReLU(),
            nn.Linear(128, _CLASSES),
        )
        self.train_accuracy = MulticlassAccuracy(_CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(_CLASSES, average="micro")
        self.test_accuracy = MulticlassAccuracy(_CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Classify images of shape (batch, 1, 8, 8); returns logits of shape (batch, 10)."""
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the cross-entropy of a batch (images, labels)."""
        return self._step(batch, "train", self.train_accuracy)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy on validation data."""
        self._step(batch, "val", self.val_accuracy)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy on test data."""
        self._step(batch, "test", self.test_accuracy)

    def _step(self, batch: tuple[Tensor, Tensor], stage: str, accuracy: MulticlassAccuracy) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = functional.cross_entropy(logits, labels)
        accuracy(logits, labels)
        train = stage == "train"
        self.log(f"{stage}_loss", loss, on_step=train, on_epoch=True, prog_bar=stage == "val", sync_dist=not train)
        self.log(f"{stage}_accuracy", accuracy, on_step=False, on_epoch=True, prog_bar=stage == "val")
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW with a cosine learning rate."""
        return cosine_adamw(self, self.learning_rate)


_TOLERANCE = 1e-6


def check_fractions(fractions: Sequence[float], num_replicas: int | None = None) -> None:
    """Raise unless `train_fractions` has a number between 0 and 1 for each rank, and they add up to 1."""
    if isinstance(fractions, str) or not isinstance(fractions, Sequence):
        raise TypeError(f"`train_fractions` must be a list of numbers, got {fractions!r}. Use for example [0.7, 0.3].")
    given = list(fractions)
    if not all(isinstance(fraction, Real) and 0 <= fraction <= 1 for fraction in given):
        raise ValueError(f"`train_fractions` must be between 0 and 1, got {given}. Use for example [0.7, 0.3].")
    if not math.isclose(sum(given), 1.0, abs_tol=_TOLERANCE):
        raise ValueError(
            f"`train_fractions` must add up to 1, got {given}, which adds up to {sum(given):g}. Use for example"
            " [0.7, 0.3]."
        )
    if num_replicas is not None and len(given) != num_replicas:
        processes = f"{num_replicas} process{'es' if num_replicas > 1 else ''}"
        raise ValueError(
            f"`train_fractions` must have one number per process, got {given} for {processes}. Leave it out to share"
            " evenly, or start as many processes with `ddp_join`."
        )


class FractionSampler(DistributedSampler[Any]):
    """Deals out a shuffled part of the data to each rank. Lightning leaves a `DistributedSampler` alone."""

    def __init__(self, dataset: Sized, fractions: Sequence[float], num_replicas: int, rank: int, seed: int = 0) -> None:
        super().__init__(cast(Any, dataset), num_replicas, rank, seed=seed)
        check_fractions(fractions, self.num_replicas)
        edges = [round(len(dataset) * edge) for edge in itertools.accumulate(fractions, initial=0.0)]
        edges[-1] = len(dataset)
        self.part = range(edges[self.rank], edges[self.rank + 1])
        self.num_samples = len(self.part)
        self.total_size = len(dataset)

    @override
    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.part), generator=generator).tolist()
        return iter([self.part[index] for index in order])


class DigitsData(DemoData):
    """Scikit-learn's digits, split at random; `train_fractions` gives each rank a share of the training images."""

    def __init__(self, batch_size: int = 32, seed: int = 1, train_fractions: Sequence[float] | None = None) -> None:
        super().__init__(batch_size, seed)
        if not importlib.util.find_spec("sklearn"):
            raise ModuleNotFoundError(
                "`data=digits` needs scikit-learn, which is not installed. Run `pip install scikit-learn`, or choose"
                " other data, such as `experiment=byte_transformer`."
            )
        if train_fractions is not None:
            check_fractions(train_fractions)
        self.train_fractions = train_fractions

    def setup(self, stage: str) -> None:
        """Load the images, scaled to [0, 1], and split them."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(
            torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels, dtype=torch.int64)
        )
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(self.seed)).tolist()
        self.train_data = Subset(data, order[:_TRAIN])
        self.val_data = Subset(data, order[_TRAIN : _TRAIN + _VAL])
        self.test_data = Subset(data, order[_TRAIN + _VAL :])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the shuffled training batches of this process."""
        if self.train_fractions is None:
            return DataLoader(self.train_data, self.batch_size, shuffle=True)
        trainer = self.trainer
        ranks = (1, 0) if trainer is None else (trainer.world_size, trainer.global_rank)
        sampler = FractionSampler(self.train_data, self.train_fractions, *ranks, seed=self.seed)
        return DataLoader(self.train_data, self.batch_size, sampler=sampler)


_REMEDY = "Use for example [3.0, 1.0], one number per replica."


class SlowedDigitsCNN(DigitsCNN):
    """A `DigitsCNN` whose replicas or ranks sleep for a time per sample, to simulate devices of different speed."""

    def __init__(self, milliseconds_per_sample: list[float], width: int = 32, learning_rate: float = 2e-3) -> None:
        if not isinstance(milliseconds_per_sample, list) or not milliseconds_per_sample:
            found = f"{milliseconds_per_sample!r}"
            raise TypeError(f"`milliseconds_per_sample` must be a list of numbers, got {found}. {_REMEDY}")
        for milliseconds in milliseconds_per_sample:
            check_number("milliseconds_per_sample", milliseconds, most=1000.0, remedy=_REMEDY)
        super().__init__(width, learning_rate)
        self.milliseconds_per_sample = milliseconds_per_sample

    @override
    def setup(self, stage: str) -> None:
        devices = getattr(self.trainer.strategy, "devices", [None])  # only `balanced_dp` has several in one process
        number, noun = max((len(devices), "replica"), (self.trainer.world_size, "rank"))
        if len(self.milliseconds_per_sample) < number:
            raise MisconfigurationException(
                f"`milliseconds_per_sample={self.milliseconds_per_sample}` has {len(self.milliseconds_per_sample)}"
                f" entries for {number} {noun}s. Give one number per {noun}."
            )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the cross-entropy of a batch (images, labels), slowly."""
        replica = current_replica()
        milliseconds = self.milliseconds_per_sample[self.global_rank if replica is None else replica]
        time.sleep(len(batch[0]) * milliseconds / 1000)
        return super().training_step(batch, batch_idx)

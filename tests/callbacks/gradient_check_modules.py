"""Modules whose loss is a mean over samples, and modules that surprise people; and what `GradientCheck` finds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.parity import CLASSES, FEATURES

SIZES = [11, 5]  # samples of the two parts
CLASS_WEIGHTS = [0.2, 1.0, 3.0]
IGNORED = -100


class Plain(LightningModule):
    """A mean over samples, with dropout, which the check switches off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(FEATURES, 8)
        self.between: nn.Module = nn.Dropout(0.5)
        self.last = nn.Linear(8, CLASSES)
        self.steps = 0

    def logits(self, batch: Any) -> Tensor:
        hidden = functional.dropout(self.between(self.first(batch[0]).tanh()), 0.1, training=self.training)
        return self.last(hidden)

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.logits(batch), batch[1].clamp_min(0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ClassWeights(Plain):
    def loss(self, batch: Any) -> Tensor:
        logits = self.logits(batch)
        weights = torch.tensor(CLASS_WEIGHTS, dtype=logits.dtype)
        return functional.cross_entropy(logits, batch[1].clamp_min(0), weights)


class SingleLoss(Plain):
    """Computes the loss in float32, whatever the parameters are, as the models of HuggingFace do."""

    def logits(self, batch: Any) -> Tensor:
        return super().logits(batch).float()


class SingleClassWeights(SingleLoss, ClassWeights):
    """The same with a loss that is no mean over samples."""


class IgnoreIndex(Plain):
    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.logits(batch), batch[1], ignore_index=IGNORED)


class MaskedMean(Plain):
    def loss(self, batch: Any) -> Tensor:
        mask = batch[1] > 0
        losses = functional.cross_entropy(self.logits(batch), batch[1].clamp_min(0), reduction="none")
        return (losses * mask).sum() / mask.sum()


class Sum(Plain):
    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.logits(batch), batch[1].clamp_min(0), reduction="sum")


class RootMean(Plain):
    def loss(self, batch: Any) -> Tensor:
        return (self.logits(batch) - 1).square().mean().sqrt()


class TwoMeans(Plain):
    def loss(self, batch: Any) -> Tensor:
        return IgnoreIndex.loss(self, batch) + (self.logits(batch) - 1).square().mean()


class Normalised(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.between = nn.BatchNorm1d(8)


class InBatchNegatives(Plain):
    def loss(self, batch: Any) -> Tensor:
        logits = self.logits(batch)
        return functional.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class Noisy(Plain):
    def loss(self, batch: Any) -> Tensor:
        logits = self.logits(batch)
        return (logits + torch.randn_like(logits)).square().mean()


class Drawing(Normalised, Noisy):
    """With everything that a check could change: random numbers, running statistics, momentum and attributes."""


def count_labels(batch: Any) -> float:
    return float((batch[1] != IGNORED).sum())


def sum_class_weights(batch: Any) -> float:
    return float(torch.tensor(CLASS_WEIGHTS, dtype=torch.float64)[batch[1].clamp_min(0)].sum())


def count_masked(batch: Any) -> float:
    return float((batch[1] > 0).sum())


@dataclass(frozen=True)
class Case:
    """What `GradientCheck` finds of a module under a `weight_by`; no remedy if parts and whole agree."""

    build: Callable[[], LightningModule]
    weight_by: Any = "samples"
    remedy: str | None = None
    fitting: Callable[[Any], float] | None = None
    options: dict[str, Any] = field(default_factory=dict)


DOUBLE = {"precision": "64-true"}
MEAN_OVER = "the loss is a mean over something other than samples"
CASES = {
    "mean": Case(Plain, options=DOUBLE),
    "mean in float32": Case(Plain),
    "mean in float32, float64 parameters": Case(SingleLoss, options=DOUBLE),
    "class weights in float32, float64 parameters": Case(
        SingleClassWeights, remedy=MEAN_OVER, fitting=sum_class_weights, options=DOUBLE
    ),
    "mean in bfloat16": Case(Plain, options={"precision": "bf16-mixed"}),
    "mean, parts weighted equally": Case(Plain, "equal", 'fits `weight_by="samples"`', len),
    "class weights": Case(ClassWeights, remedy=MEAN_OVER, fitting=sum_class_weights, options=DOUBLE),
    "class weights in float32": Case(ClassWeights, remedy=MEAN_OVER, fitting=sum_class_weights),
    "class weights in bfloat16": Case(
        ClassWeights, remedy=MEAN_OVER, fitting=sum_class_weights, options={"precision": "bf16-mixed"}
    ),
    "class weights, counted": Case(ClassWeights, sum_class_weights, options=DOUBLE),
    "ignored labels": Case(IgnoreIndex, remedy=MEAN_OVER, fitting=count_labels, options=DOUBLE),
    "ignored labels, counted": Case(IgnoreIndex, count_labels, options=DOUBLE),
    "masked mean": Case(MaskedMean, remedy=MEAN_OVER, fitting=count_masked, options=DOUBLE),
    "masked mean, counted": Case(MaskedMean, count_masked, options=DOUBLE),
    "sum": Case(Sum, remedy='fits `weight_by="sum"`', options=DOUBLE),
    "sum, added up": Case(Sum, "sum", options=DOUBLE),
    "root of a mean": Case(RootMean, remedy="which do not add up to 1", options=DOUBLE),
    "two means": Case(TwoMeans, remedy="terms that are means over different things", options=DOUBLE),
    "batch normalisation": Case(Normalised, remedy="Batch normalisation computes", options=DOUBLE),
    "in-batch negatives": Case(InBatchNegatives, remedy="the forward pass mixes samples", options=DOUBLE),
    "random numbers": Case(Noisy, remedy="The step draws random numbers", options=DOUBLE),
}


def samples(double: bool) -> TensorDataset:
    """Labels of both parts have other shares of ignored ones, and of each class."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(sum(SIZES), FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (sum(SIZES),), generator=generator)
    labels[4:8] = IGNORED
    return TensorDataset(features if double else features.float(), labels)


def part(data: TensorDataset, index: int) -> TensorDataset:
    start = sum(SIZES[:index])
    return TensorDataset(*(tensor[start : start + SIZES[index]] for tensor in data.tensors))


def loader(case: Case, rank: int | None = None) -> DataLoader[Any]:
    data = samples(case.options == DOUBLE)
    data = data if rank is None else part(data, rank)
    return DataLoader(data, batch_size=len(data))


def expected_weights(case: Case) -> list[float] | None:
    """The weights that fit, of the two parts."""
    if case.fitting is None:
        return None
    data = samples(double=True)
    counts = [
        case.fitting(part(data, index).tensors if case.fitting is not len else range(size))
        for index, size in enumerate(SIZES)
    ]
    return [count / sum(counts) for count in counts]

"""Losses that are means over tokens or have class weights, on ranks with different numbers of them."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ddp_ext import ClassWeights, TokenCount
from tests.parity import relative_difference
from tests.strategies.toolkit import ALONE, RANK, STRATEGIES, Trace, assert_same_training, fit, run_on_ranks, values_of

VOCABULARY, LENGTH = 11, 20
CLASS_WEIGHTS = torch.linspace(0.1, 3, VOCABULARY, dtype=torch.float64)
TextBatch = dict[str, Tensor]


class LanguageModel(LightningModule):
    """Predicts each token from the one before it; the loss is a mean over the tokens that are not ignored."""

    def __init__(self, weight: Tensor | None = None) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY))
        self.weight = weight

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        logits, targets = self.network(batch["input_ids"][:, :-1]), batch["labels"][:, 1:]
        weight = None if self.weight is None else self.weight.to(logits)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@dataclass(frozen=True)
class Case:
    """A run of `windows` micro-batches per step, in which this part of the places of a row is padding."""

    padding: float
    windows: int = 1
    packed: bool = False
    strategy: str = "ddp_join"
    weight_by: Any = "tokens"
    weight: Tensor | None = None

    def batches(self, rank: int) -> list[TextBatch]:
        """Make 5 batches of a rank, 4 of other ranks than the first, with fewer tokens from batch to batch."""
        generator = torch.Generator().manual_seed(rank)
        made = []
        for number in range(5 if rank == 0 or self.strategy == "ddp_checkpoint" else 4):
            ids = torch.randint(VOCABULARY, (2 + rank, LENGTH), generator=generator)
            lengths = torch.randint(
                2, 3 + round(LENGTH * (1 - self.padding) / (1 + number)), (2 + rank,), generator=generator
            )
            is_token = torch.arange(LENGTH) < lengths[:, None]
            if self.packed:
                is_first = torch.arange(LENGTH).expand_as(ids)[is_token] == 0
                ids = ids[is_token]
                made.append({"input_ids": ids[None], "labels": ids.masked_fill(is_first, -100)[None]})
            else:
                made.append({"input_ids": ids, "labels": ids.masked_fill(~is_token, -100)})
        return made

    def __call__(self, folder: str = "") -> Trace:
        """Train on this rank."""
        strategy = STRATEGIES[self.strategy](weight_by=self.weight_by)
        return self._fit(self.batches(RANK), strategy=strategy, accumulate_grad_batches=self.windows)

    def alone(self, world_size: int) -> Trace:
        """Train in one process on the batches of all ranks."""
        by_rank = [self.batches(rank) for rank in range(world_size)]
        windows = [
            [batch for batches in by_rank for batch in batches[start : start + self.windows]]
            for start in range(0, 5, self.windows)
        ]
        dim = 1 if self.packed else 0
        whole = [{key: torch.cat([batch[key] for batch in window], dim) for key in window[0]} for window in windows]
        return self._fit(whole, **ALONE)

    def _fit(self, batches: list[TextBatch], **options: Any) -> Trace:
        torch.manual_seed(0)
        return fit(LanguageModel(self.weight), DataLoader(batches, batch_size=None), **options)[1]


def counted_classes(batch: TextBatch) -> Tensor:
    return batch["labels"][:, 1:]


CASES = {
    "no padding": Case(0.0),
    "half is padding": Case(0.5, windows=4),
    "most is padding": Case(0.9),
    "packed": Case(0.5, windows=4, packed=True),
    "equally many batches": Case(0.5, windows=4, strategy="ddp_checkpoint", weight_by=TokenCount(shift=True)),
    "class weights": Case(0.5, weight=CLASS_WEIGHTS, weight_by=ClassWeights(CLASS_WEIGHTS, labels=counted_classes)),
}
CONTROLS = {
    "by samples": (Case(0.9, weight_by="samples"), CASES["most is padding"]),
    "in windows by samples": (Case(0.5, windows=4, weight_by="samples"), CASES["half is padding"]),
    "class weights by tokens": (Case(0.5, weight=CLASS_WEIGHTS), CASES["class weights"]),
}


@pytest.mark.parametrize(
    "world_size",
    [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 3, 4))],
)
def test_gradients_are_means_over_the_tokens_of_all_ranks(world_size):
    found = run_on_ranks(world_size, {**CASES, **{name: control for name, (control, _) in CONTROLS.items()}})
    for name, case in CASES.items():
        assert_same_training(values_of(found, name), case.alone(world_size))
    for name, (_, exact) in CONTROLS.items():
        wrong, *_ = values_of(found, name)
        if world_size > 1:
            assert relative_difference(wrong.gradients, exact.alone(world_size).gradients) > 1e-3, name

"""Losses that are means over tokens or have class weights, on ranks with different numbers of them."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ddp_ext import ClassWeights, TokenBudgetBatchSampler, TokenCount
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
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), self.weight)

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
    [
        2,
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_means_over_the_tokens_of_all_ranks(world_size):
    found = run_on_ranks(world_size, {**CASES, **{name: control for name, (control, _) in CONTROLS.items()}})
    for name, case in CASES.items():
        assert_same_training(values_of(found, name), case.alone(world_size))
    for name, (_, exact) in CONTROLS.items():
        wrong, *_ = values_of(found, name)
        if world_size > 1:
            assert relative_difference(wrong.gradients, exact.alone(world_size).gradients) > 1e-3, name


class Rows:
    """Sequences of different length, each with its index."""

    lengths: ClassVar = [1 + index * 7 % 12 for index in range(40)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.lengths[index]


class Seen(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[list[int]]] = [[]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen[-1].append([index for index, _ in batch])
        return super().training_step({"input_ids": (ids := torch.zeros(1, 4, dtype=torch.int64)), "labels": ids}, 0)

    def on_train_epoch_end(self) -> None:
        self.seen.append([])


def a_token_budget(folder: str) -> Any:
    sampler = TokenBudgetBatchSampler(Rows.lengths, max_tokens=24)
    module = Seen()
    data = DataLoader(Rows(), batch_sampler=sampler, collate_fn=list)
    options = {"max_epochs": 2, "use_distributed_sampler": True, "strategy": "ddp_join"}
    made, _ = fit(module, data, **options)
    return module.seen[:2], made.global_step


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_batches_with_a_token_budget_are_dealt_out_to_ranks_without_losing_any(world_size):
    by_rank = values_of(run_on_ranks(world_size, [a_token_budget]), a_token_budget)
    epochs = list(zip(*(seen for seen, _ in by_rank), strict=True))
    for epoch in epochs:
        batches = [batch for of_rank in epoch for batch in of_rank]
        assert sorted(index for batch in batches for index in batch) == list(range(40))
        assert max(len(batch) * max(Rows.lengths[index] for index in batch) for batch in batches) <= 24
        assert max(map(len, epoch)) - min(map(len, epoch)) <= 1
        assert sum(map(len, epoch)) % world_size  # the case: some rank has one batch less
    assert epochs[0] != epochs[1]
    assert {steps for _, steps in by_rank} == {2 * max(map(len, epochs[0]))}

"""Batches of any form are weighted by the samples that their loader draws, and it is an error if it draws none.

Features of a batch are transposed, so the first dimension of its tensors is not the number of samples.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.parity import relative_difference
from tests.strategies.toolkit import ALONE, RANK, STRATEGIES, Classifier, Trace, fit, run_on_ranks, samples, values_of

DATA = TensorDataset(*samples(22))
Sizes = list[list[list[int]]]  # the indices of each rank's batches
EVEN: Sizes = [[[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13], [15, 16]], [[17, 18], [19], [20], [21]]]
UNEVEN: Sizes = [EVEN[0], [[17, 18, 19], [20, 21]]]


def transpose(batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].T.contiguous(), batch[1][None]


def collate(rows: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    return transpose([torch.stack(column) for column in zip(*rows, strict=True)])


def batch_of(indices: list[int]) -> tuple[Tensor, Tensor]:
    return collate([DATA[index] for index in indices])


class Transposed(Classifier):
    """Takes batches of transposed features."""

    def loss(self, batch: Any) -> Tensor:
        features, labels = batch if isinstance(batch[0], Tensor) else collate(batch)  # of a list of samples
        return super().loss((features.T, labels[0]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss.detach(), on_step=True, on_epoch=True, sync_dist=True, batch_size=self.size_of(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), on_epoch=True, sync_dist=True, batch_size=self.size_of(batch))

    def size_of(self, batch: Any) -> int | None:
        """Lightning has to be given the size of a batch; the strategies know the samples that were drawn."""
        return None if self.trainer.world_size > 1 else len(batch[1][0])


def train(loader: DataLoader, **options: Any) -> tuple[Trace, list[str]]:
    """Train two epochs; returns the trace, and the warnings about weights."""
    seed_everything(0, verbose=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = fit(Transposed().double(), loader, loader, max_epochs=2, **options)[1]
    texts = [str(one.message) for one in caught]
    return trace, [text for text in texts if "weight" in text]


def train_alone(by_rank: Sizes) -> Trace:
    """Train in one process on the samples of all ranks in each step."""
    steps = [[of_rank[step] for of_rank in by_rank if step < len(of_rank)] for step in range(max(map(len, by_rank)))]
    return train(ready([list(chain(*step)) for step in steps]), **ALONE)[0]


def drawn(indices: list[list[int]]) -> DataLoader:
    return DataLoader(DATA, batch_sampler=indices, collate_fn=collate)


def ready(indices: list[list[int]]) -> DataLoader:
    return DataLoader([batch_of(batch) for batch in indices], batch_size=None)


class Flagged(Dataset):
    """Marks samples from 100 on as damaged."""

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, ...], bool]:
        return DATA[index % 100], index >= 100


def drop(rows: list[tuple[tuple[Tensor, ...], bool]]) -> tuple[Tensor, Tensor]:
    return collate([row for row, is_damaged in rows if not is_damaged])


def listed(rows: list[tuple[tuple[Tensor, ...], bool]]) -> list[tuple[Tensor, ...]]:
    return [row for row, is_damaged in rows if not is_damaged]


def dropped(indices: list[list[int]], collate_fn: Callable[[Any], Any] = drop) -> DataLoader:
    """Draw damaged samples for every batch but the last, in which the collate function keeps all."""
    more = [[*batch, *range(100, 101 + RANK)] for batch in indices[:-1]]
    return DataLoader(Flagged(), batch_sampler=[*more, indices[-1]], collate_fn=collate_fn)


CASES: dict[str, tuple[Callable[[list[list[int]]], DataLoader], dict[str, Any]]] = {
    "drawn": (drawn, {}),
    "ready, with `batch_dim`": (ready, {"batch_dim": 1}),
    "dropped by the collate function": (dropped, {"batch_dim": 1}),
    "dropped from a list": (partial(dropped, collate_fn=listed), {}),
}


def sizes_of(strategy: str) -> Sizes:
    return EVEN if strategy == "ddp_checkpoint" else UNEVEN


def train_case(name: str, strategy: str, folder: str) -> tuple[Trace, list[str]]:
    make, options = CASES[name]
    return train(make(sizes_of(strategy)[RANK]), strategy=STRATEGIES[strategy](**options))


def fail(strategy: str, folder: str) -> str:
    """Return the error of this rank in a training of which only rank 1 cannot count the samples."""
    try:
        train((ready if RANK else drawn)(sizes_of(strategy)[RANK]), strategy=strategy)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.fixture(scope="module")
def found():
    cases = {f"{name}, {strategy}": partial(train_case, name, strategy) for name in CASES for strategy in STRATEGIES}
    return run_on_ranks(2, cases)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_logged_values_equal_one_process(found, name, strategy):
    traces, warned = zip(*values_of(found, f"{name}, {strategy}"), strict=True)
    alone = train_alone(sizes_of(strategy))
    assert traces[0].digests == traces[1].digests != []
    assert relative_difference([traces[0].parameters], [alone.parameters]) < 1e-12
    assert [len(texts) for texts in warned] == [name.startswith("dropped")] * 2
    for trace in traces:
        for values, wanted in zip(trace.metrics, alone.metrics, strict=True):
            assert values == pytest.approx(wanted, rel=1e-6)
        assert [loss for _, loss in trace.validations] == pytest.approx(
            [loss for _, loss in alone.validations], rel=1e-6
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_cannot_count_its_samples_ends_training_on_all_ranks_before_the_first_step(strategy):
    other, own = run_on_ranks(2, {"": partial(fail, strategy)})[""]
    assert own.startswith('ValueError: rank 1: `weight_by="samples"` needs numbers of samples')
    assert own.endswith('or `weight_by="equal"` if batches are equally large on all ranks.')
    assert other.startswith("OtherRankError: rank 1 failed: ValueError: rank 1: `weight_by")
    assert "at step 0, training, batch 0" in other


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_number_that_was_drawn_for_a_batch_ends_with_it(strategy):
    within, after = [], []

    class Asking(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            within.append(trainer.strategy.count_samples(batch))

        def on_train_epoch_end(self, trainer, module):
            after.append(trainer.strategy.count_samples(torch.zeros(5, 3)))

        def on_validation_epoch_end(self, trainer, module):
            after.append(trainer.strategy.count_samples(torch.zeros(4, 3)))

    loader = DataLoader(DATA, batch_size=9, collate_fn=collate)
    made, _ = fit(Transposed(), loader, loader, callbacks=[Asking()], strategy=strategy, devices=1)
    assert within == [9, 9, 4]  # not 5, the number of features
    assert after == [4, 5]
    assert made.train_dataloader is made.val_dataloaders is loader  # of the user, on one rank

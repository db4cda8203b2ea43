"""Loaders that are given batch samplers."""

import itertools
from collections.abc import Callable
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.strategies.join_cases.casing import RANK, WORLD_SIZE, case, trainer
from tests.strategies.join_ranks import Classifier, samples

SAMPLES, FIRST = 17, 4
data = TensorDataset(*samples(SAMPLES))


class OwnBatchSampler(BatchSampler):
    pass


def of_the_first() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * FIRST + [0.0] * (SAMPLES - FIRST), SAMPLES)


SAMPLERS: dict[str, Callable[[], BatchSampler]] = {
    "torch's": lambda: BatchSampler(RandomSampler(data), 3, drop_last=False),
    "that drops": lambda: BatchSampler(RandomSampler(data), 3, drop_last=True),
    "of a kind of its own": lambda: OwnBatchSampler(RandomSampler(data), 3, drop_last=False),
    "with a weighted sampler": lambda: BatchSampler(of_the_first(), 3, drop_last=False),
    "of a kind of its own, with a weighted sampler": lambda: OwnBatchSampler(of_the_first(), 3, drop_last=False),
    "with a DistributedSampler": lambda: BatchSampler(
        DistributedSampler(data, WORLD_SIZE, RANK, shuffle=False), 3, drop_last=False
    ),
}


class Seeing(Classifier):
    """Keeps the indices of each batch. Has a loader of its own, if it is told its batch sampler."""

    def __init__(self, make: Callable[[], BatchSampler] | None = None) -> None:
        super().__init__()
        self.make = make
        self.batches: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch[0].tolist())
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> list[int]:
        return batch[0].tolist()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(data, batch_sampler=self.make())


def see(strategy: str, in_hook: bool, name: str, epochs: int = 2) -> list[list[int]]:
    make = SAMPLERS[name]
    module = Seeing(make)
    loaders = [] if in_hook else [DataLoader(data, batch_sampler=make())]
    trainer(strategy=strategy, max_epochs=epochs, use_distributed_sampler=True).fit(module, *loaders)
    return module.batches


@case
def batch_samplers(folder: str) -> Any:
    """In two epochs; of the strategy, where loaders are made, and the kind of the batch sampler."""
    places = itertools.product(("ddp_join", "ddp_checkpoint"), (False, True), SAMPLERS)
    found = {place: see(*place) for place in places}
    return found, see("ddp", True, "torch's", epochs=1)


@case
def prediction_with_a_batch_sampler(folder: str) -> Any:
    loader = DataLoader(data, batch_sampler=SAMPLERS["torch's"]())
    return trainer(strategy="ddp_join", use_distributed_sampler=True).predict(Seeing(), loader)

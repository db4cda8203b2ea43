"""Samplers of users, which are dealt out to the ranks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

from tests.strategies.join_cases.batch_samplers import SAMPLES, Seeing, data
from tests.strategies.join_cases.casing import RANK, case, trainer


class ByEpoch(Sampler[int]):
    """Begins with another sample in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter((index + self.epoch) % SAMPLES for index in range(SAMPLES))


def without_replacement() -> Sampler[int]:
    """Has a generator of its own, which is another one on every rank."""
    generator = torch.Generator().manual_seed(RANK)
    return WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False, generator=generator)


SAMPLERS = {"by epoch": ByEpoch, "with a generator": without_replacement}


@case
def samplers(folder: str) -> Any:
    """What is seen in two epochs."""
    found = {}
    for name, make in SAMPLERS.items():
        module = Seeing()
        loader = DataLoader(data, batch_size=3, sampler=make())
        trainer(max_epochs=2, use_distributed_sampler=True).fit(module, loader)
        batches = len(module.batches) // 2
        found[name] = module.batches[:batches], module.batches[batches:]
    return found

"""Loaders in lockstep on several ranks; kept apart because every rank imports it."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp_ext.errors import DDPExtError
from lightning_ddp_ext.join.lockstep_loader import HasNextBatch, LockstepLoader
from lightning_ddp_ext.reducer.control import StepControl


class Stream:
    """Knows its end when it comes."""

    def __init__(self, rank: int, length: int) -> None:
        self.items = [f"{rank}.{number}" for number in range(length)]
        self.asked = 0

    def __iter__(self) -> Iterator[str]:
        for item in self.items:
            self.asked += 1
            yield item


class Opaque:
    """What cannot be sent."""


def fill(kinds: Sequence[str]) -> list[Any]:
    """Let rank 1, which has no batch, be given one of each kind; returns what it sees, warnings and errors."""
    dist.init_process_group("gloo")
    batches = {
        "tensors": {"features": torch.arange(6.0).reshape(2, 3), "names": ["a", "b"]},
        "opaque part": {"features": torch.ones(2), "extra": [Opaque()]},
        "opaque": Opaque(),
    }
    found = []
    for kind in kinds:
        own = [batches[kind]] if dist.get_rank() == 0 else []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                seen: Any = [batch for batch, _ in LockstepLoader(own, [1, 0], dist.group.WORLD)]
            except DDPExtError as error:
                seen = f"{type(error).__name__}: {error}"
        found.append((seen, [str(one.message) for one in caught]))
    return found


def iterate(cases: Sequence[tuple[Sequence[int], bool, dict[str, Any]]]) -> list[Any]:
    """Iterate twice for each case; returns the steps, what is left out, or an error."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = []
    for lengths, sized, options in cases:
        stream = Stream(rank, options.pop("true_length", lengths)[rank])
        has_next_batch = HasNextBatch(dist.group.WORLD, StepControl() if options.pop("flags_carried", False) else None)
        loader = LockstepLoader(
            stream, list(lengths) if sized else None, dist.group.WORLD, **options, has_next_batch=has_next_batch
        )
        try:
            epochs = [list(_make_steps(loader, has_next_batch)) for _ in range(2)]
            found.append((epochs, loader.left_out, stream.asked))
        except DDPExtError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _make_steps(loader: LockstepLoader, has_next_batch: HasNextBatch) -> Iterator[tuple[Any, ...]]:
    """Iterate; in every second step ranks tell each other their votes."""
    for number, (batch, participation) in enumerate(loader):
        if number % 2:
            told = torch.zeros(dist.get_world_size())
            told[dist.get_rank()] = has_next_batch.local
            dist.all_reduce(told)
            has_next_batch.receive(told.tolist())
        yield batch, participation.active, participation.is_shadow, participation.is_uneven

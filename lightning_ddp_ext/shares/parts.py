"""Global batches of a fixed number of parts, of which each rank fetches a run; each part has its own random numbers."""

import copy
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_ddp_ext._compat.torch import DatasetProxy, has_torchs_iterator
from lightning_ddp_ext._devices import seed_rng
from lightning_ddp_ext.batches.chunk_sizes import ChunkRule, even_chunks
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.resume.rng_state import preserved_rng_state
from lightning_ddp_ext.shares.share_table import DividedBatch, Division, ShareTable


def seed_process(*numbers: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy, torch and a device with a hash of numbers."""
    seed = int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little") >> 1
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type != "cpu":
        seed_rng(seed, device)


class PartDataset(DatasetProxy):
    """A dataset that fetches and collates each part of a batch by itself."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        super().__init__(dataset)
        self._collate = collate

    @override
    def __getitems__(self, indices: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
        """Return the batches of the parts, given the seeds and the indices of each."""
        fetch, batches = getattr(self._dataset, "__getitems__", None), []
        with preserved_rng_state():
            for seeds, part in indices:
                seed_process(*seeds)
                batches.append(self._collate(fetch(part) if callable(fetch) else [self._dataset[one] for one in part]))
        return batches


@dataclass(frozen=True, slots=True)
class PartDivision(Division):
    """How a global batch is divided into parts, and how many of them each rank gets."""

    parts: int = 1
    seeds: tuple[int, ...] = field(default=(), compare=False)  # of the batch

    @override
    def divide(self, batch_size: int, costs: Sequence[float] | None) -> "DividedParts":
        numbers = Division.divide(self, self.parts, None).nominal
        starts = [0, *accumulate(even_chunks(batch_size, self.parts))]
        cuts = [starts[first] for first in (0, *accumulate(numbers))]
        sizes = tuple(end - start for start, end in pairwise(cuts))
        return DividedParts(range(batch_size), sizes, numbers, starts, self.seeds)


@dataclass(frozen=True, slots=True)
class DividedParts(DividedBatch):
    """The parts of a batch; `nominal` are the numbers of parts of the ranks."""

    starts: Sequence[int]
    seeds: tuple[int, ...]

    @override
    def own(self, batch: Any, rank: int) -> list[Any]:
        first = sum(self.nominal[:rank])
        cut = [batch[start:end] for start, end in pairwise(self.starts[first : first + self.nominal[rank] + 1])]
        return [((*self.seeds, part), indices) for part, indices in enumerate(cut, first) if len(indices)]


class PartTable(ShareTable):
    """Divides training batches into as many parts as there are virtual ranks; evaluation divides samples."""

    def __init__(self, rule: ChunkRule, ranks: int, parts: int, seeds: Callable[[], tuple[int, ...]]) -> None:
        super().__init__(rule, ranks)
        self._parts, self._seeds = parts, seeds  # these of the epoch

    def seeds(self, number: int) -> tuple[int, ...]:
        """Return the seeds of the batch of this number."""
        return *self._seeds(), number - self._first

    @override
    def check_batch_size(self, batch_size: int | None) -> None:
        pass  # ranks without a part with samples are expected

    @override
    def prepare(self, loaders: Sequence[Any]) -> Sequence[Any]:
        one = loaders[0]
        if len(loaders) > 1 or not has_torchs_iterator(one) or isinstance(one.dataset, IterableDataset):
            found = f"`{type(one).__name__}` of `{type(getattr(one, 'dataset', one)).__name__}`"
            raise UnsupportedFeatureError(
                "`virtual_ranks` needs a single training loader, a `DataLoader` with a map-style dataset and a batch"
                f" size, got {len(loaders)} with {found}. Leave `virtual_ranks` out."
            )
        prepared = copy.copy(one)
        vars(prepared).update(dataset=PartDataset(one.dataset, one.collate_fn), collate_fn=list, _iterator=None)
        return [prepared]

    @override
    def division(self, number: int, is_training: bool) -> Division:
        plain = super().division(number, is_training)
        if not is_training:
            return plain
        own = self._parts, self.seeds(number)
        return PartDivision(plain.rule, plain.ranks, plain.shares, plain.limits, False, None, *own)

"""Global batches that are cut into parts, each with its own random numbers; ranks share the parts as if samples."""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_ddp_ext._compat.torch import DatasetProxy, has_torchs_iterator, with_sampler
from lightning_ddp_ext.batches.chunk_sizes import even_chunks
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.resume.rng_state import preserved_rng_state, seed_generators
from lightning_ddp_ext.shares.global_batches import as_sequence

Part = tuple[tuple[int, ...], Any]
"""Seeds of a part, and its indices."""


def seed_process(*numbers: int, device: torch.device | None = None) -> None:
    """Seed all generators with a hash of numbers."""
    seed = int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little") >> 1
    seed_generators(seed, device)


class PartDataset(DatasetProxy):
    """A dataset whose items are the batches of parts."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        super().__init__(dataset)
        self._collate = collate

    @override
    def __getitems__(self, indices: Sequence[Part]) -> list[Any]:
        fetch, batches = getattr(self._dataset, "__getitems__", None), []
        with preserved_rng_state():
            for seeds, part in indices:
                seed_process(*seeds)
                batches.append(self._collate(fetch(part) if callable(fetch) else [self._dataset[one] for one in part]))
        return batches


class PartSampler:
    """Cuts the batches of a batch sampler into parts; `sizes` are the samples of each batch of the epoch."""

    def __init__(self, batches: Any, parts: int, seeds: Callable[[], tuple[int, ...]]) -> None:
        self._batches, self._parts = batches, parts
        self.seeds = seeds  # returns those of the epoch
        self.sizes = array("q")

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # not set yet, while the object is copied
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Part]]:
        self.sizes, seeds = array("q"), self.seeds()
        for number, batch in enumerate(self._batches):
            indices = as_sequence(batch)
            self.sizes.append(len(indices))
            cut = enumerate(pairwise([0, *accumulate(even_chunks(len(indices), self._parts))]))
            yield [((*seeds, number, part), indices[start:end]) for part, (start, end) in cut if start < end]


def cut_loader(loaders: Sequence[Any], parts: int, seeds: Callable[[], tuple[int, ...]]) -> Any:
    """Return a copy of the only training loader, whose samples are the batches of parts."""
    one = loaders[0]
    for is_present, found in (
        (len(loaders) > 1, f"{len(loaders)} training loaders"),
        (isinstance(getattr(one, "dataset", None), IterableDataset), "an iterable dataset"),
        (not has_torchs_iterator(one), f"a `{type(one).__name__}` with iteration of its own or `batch_size=None`"),
    ):
        if is_present:
            raise UnsupportedFeatureError(
                "`virtual_ranks` needs a single training loader, a `DataLoader` with a map-style dataset and a batch"
                f" size, got {found}. Leave `virtual_ranks` out."
            )
    draw = partial(PartSampler, parts=parts, seeds=seeds)
    return with_sampler(one, draw, list, PartDataset(one.dataset, one.collate_fn))

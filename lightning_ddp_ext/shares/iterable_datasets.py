"""Streams that every rank reads whole: each batch is divided when it is collated, and ranks compare its content."""

import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from lightning_ddp_ext.batches.containers import walk
from lightning_ddp_ext.batches.sample_counts import count_drawn
from lightning_ddp_ext.shares.costs import SampleCost
from lightning_ddp_ext.shares.global_batches import GlobalBatches, ShareCollate
from lightning_ddp_ext.shares.share_table import Division

_MOST_COMPARED = 1000  # values and containers of a batch


class SharedStreamBatch(NamedTuple):
    """A batch of a stream on this rank, as it comes from a worker: only there its number of samples is known."""

    batch: Any  # or `NoSamples`
    number: int
    samples: int | None  # of this rank, without missing ones; None if they cannot be counted
    content: int  # hash of all samples
    sizes: Sequence[int]
    nominal: Sequence[int]


class StreamIndices(list[None]):
    """The indices of a batch of a stream: as many as samples, and the division of the batch.

    torch's fetcher passes only the samples to the collate function. It iterates over the indices first, in the same
    thread, and that records them in `_fetching`.
    """

    number: int
    division: Division

    def __iter__(self) -> Iterator[None]:
        _fetching.indices = self
        return super().__iter__()


_fetching = threading.local()  # `Queue` iterates too, in another thread, when it pickles the indices for a worker


class StreamSampler:
    """Yields the indices of a stream's batches, each with its division."""

    def __init__(self, batch_sampler: Iterable[Any], batches: GlobalBatches) -> None:
        self.batch_sampler = batch_sampler
        self._batches = batches

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[StreamIndices]:
        for indices in self.batch_sampler:
            drawn = StreamIndices(indices)
            drawn.number, drawn.division = self._batches.draw()
            yield drawn


@dataclass(frozen=True)
class StreamCollate:
    """Collates the samples of this rank, out of all samples of a batch of a stream."""

    collate: ShareCollate
    rank: int
    cost: SampleCost | None

    def __call__(self, samples: list[Any]) -> SharedStreamBatch:
        """Collate the share of this rank."""
        indices: StreamIndices = _fetching.indices
        place = f"rank {self.rank}, batch {indices.number}, sample"
        cost = self.cost
        costs = None if cost is None else [cost(one, f"{place} {index}") for index, one in enumerate(samples)]
        divided = indices.division.divide(len(samples), costs)
        own = divided.own(samples, self.rank)
        batch = self.collate(own)
        counted = count_drawn(own, batch, None) if own else 0
        content = hash_of_content(samples, most_dimensions=1)
        return SharedStreamBatch(batch, indices.number, counted, content, divided.sizes, divided.nominal)


def hash_of_content(batch: Any, most_dimensions: int) -> int:
    """Return a hash of the first integers and texts in a batch, or of its floats if it has none of these.

    Ranks may transform a sample with other random numbers, which changes neither labels nor keys. So arrays of more
    than `most_dimensions`, such as images and their masks, are skipped. So are objects that are no containers. The hash
    of nothing is 0.
    """
    hashes = {False: 0, True: 0}  # of integers and texts, and of floats
    has_others = False
    for part in islice(walk(batch), _MOST_COMPARED):
        if isinstance(part, Tensor):
            is_comparable = part.device.type == "cpu" and part.layout == torch.strided and not part.is_nested
            if not is_comparable or part.dim() > most_dimensions or part.is_complex() or part.is_quantized:
                continue
            flat = part.detach().resolve_neg().contiguous().reshape(-1)
            is_float, content = part.is_floating_point(), flat.view(torch.uint8).numpy().tobytes()
        elif isinstance(part, numpy.ndarray | numpy.generic):
            if part.ndim > most_dimensions or part.dtype.kind not in "biuSUf":
                continue
            is_float, content = part.dtype.kind == "f", part.tobytes()
        elif isinstance(part, int | float | str | bytes):
            is_float, content = isinstance(part, float), repr(part).encode()
        else:
            continue
        has_others = has_others or not is_float
        hashes[is_float] = zlib.crc32(content, hashes[is_float])
    return hashes[not has_others]

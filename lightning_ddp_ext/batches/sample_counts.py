"""Samples of batches: their numbers, means over ranks that are weighted by them, and their indices."""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext._devices import widest_float
from lightning_ddp_ext.batches.containers import is_array, values_of, walk
from lightning_ddp_ext.batches.splitting import count_samples, may_be_one_sample
from lightning_ddp_ext.errors import BatchSplitError, WarnOnce


class DrawnSamples(int):
    """The number of samples that a loader has drawn for a batch, and the number that the batch holds if it shows it."""

    held: int | None = None


def count_drawn(samples: Any, batch: Any, batch_size: int | None) -> DrawnSamples | None:
    """Return the number of samples that a collate function has received, see `iterate_counting`."""
    if not isinstance(samples, list):
        return None  # `__getitems__` of the dataset may return a table or a tuple of columns
    if len(samples) == 1 and batch is samples[0]:
        return None  # nothing was collated: the dataset has made the batch
    # The only sample of a last batch was collated as the samples of the batches before it.
    if batch_size == 1 and len(samples) == 1 and not may_be_one_sample(batch):
        return None
    # Datasets return None for a broken sample, which the collate function skips.
    given = [sample for sample in samples if sample is not None]
    drawn = DrawnSamples(len(given))
    drawn.held = _count_held(given, batch) if given else None
    return drawn or None


def _count_held(samples: Sequence[Any], batch: Any) -> int | None:
    """Return how many of the samples a batch holds, as graphs, by their own arrays, or in stacks of such shapes."""
    parts, of_first = _items(batch), _items(samples[0])
    if parts and all(type(part) is Tensor and part.shape[:1] == (len(samples),) for part in parts):
        shallow = max(part.ndim for part in parts) - 1  # in one pass, since most batches are stacks of all samples
        if all(one.ndim <= shallow if type(one) is Tensor else isinstance(one, int | float | str) for one in of_first):
            return len(samples)
    graphs = [part.num_graphs for part in walk(batch) if isinstance(getattr(part, "num_graphs", None), int)]
    arrays = [array for array in _arrays(batch) if array.ndim]
    depth, of_sample = (max((one.ndim for one in _arrays(value)), default=0) for value in (batch, samples[0]))
    if graphs or not arrays or (depth > of_sample and all(array.shape[0] == len(samples) for array in arrays)):
        return graphs[0] if graphs else None
    if depth <= of_sample:
        held, of_samples = set(map(id, arrays)), [set(map(id, _arrays(sample))) for sample in samples]
        return sum(not held.isdisjoint(own) for own in of_samples) if held <= set().union(*of_samples) else None
    for shown in (samples[:1], samples):  # one sample suffices unless shapes differ, and is faster
        shapes = {tuple(array.shape) for sample in shown for array in _arrays(sample)}
        stacked = [
            (math.prod(shape), size <= len(samples), size)
            for shape in (tuple(array.shape) for array in arrays)
            for dim, size in enumerate(shape)
            if len(shape) > 1 and (*shape[:dim], *shape[dim + 1 :]) in shapes
        ]
        if stacked:
            return int(max(stacked)[-1])  # of the largest array
    return None


def _items(value: Any) -> list[Any]:
    """Return the items of a plain container, or another value as a single item."""
    return [*value.values()] if type(value) is dict else [*value] if type(value) in (list, tuple) else [value]


def _arrays(value: Any) -> list[Any]:
    """Return the arrays in a value that have a shape."""
    arrays = filter(is_array, walk(value))
    return [one for one in arrays if hasattr(one, "ndim") and not getattr(one, "is_nested", False)]


def mean_count(counts: Sequence[int | None]) -> float | None:
    """Return the mean number of samples of the loaders that contribute to a batch, or None if one is unknown."""
    if len(counts) < 2 or None in counts:
        return counts[0] if len(counts) == 1 else None
    return sum(filter(None, counts)) / len(counts)


class BatchSamples:
    """Number of samples in the current batch: the loader has drawn them, or tensors have them in `batch_dim`."""

    def __init__(self, batch_dim: int) -> None:
        self.problem = ""  # why the last batch has no count
        self.batch_dim = batch_dim
        self._drawn: float | None = None
        self._warn = WarnOnce()

    def require(self, batch: Any, rank: int) -> float:
        """Return the number of samples in the batch; raise a ValueError if it is unknown."""
        if (samples := self.count(batch)) is None:
            raise ValueError(
                f'rank {rank}: `weight_by="samples"` needs numbers of samples, and those of a batch cannot be counted:'
                f" {self.problem} Pass a callable `weight_by`, which returns the weight of a batch, such as `len` for a"
                ' list of samples, or `weight_by="equal"` if batches are equally large on all ranks.'
            )
        return samples

    def begin(self, drawn: float | None, batch: Any = None) -> None:
        """Begin a batch with the drawn samples, None if unknown or at its end; a batch that dropped some decides."""
        self._drawn, held = None, drawn
        if drawn is not None and batch is not None:
            held = getattr(drawn, "held", None)
            held = self._find_held(drawn, batch) if held is None else min(held, drawn)
        self._drawn = drawn if held is None else held
        if drawn is not None and held != drawn:
            number = "an unknown number of" if held is None else f"{held:g}"
            self._warn(
                f"the loader has drawn {drawn:g} samples for a batch of {number} samples, so that the batch has weight"
                f" {self._drawn:g}. Ignore this if that is right. Otherwise pass a callable `weight_by` that counts"
                f" samples, or set `batch_dim` if they are not in dimension {self.batch_dim}."
            )

    def _find_held(self, drawn: float, batch: Any) -> float | None:
        """Return the number of samples in a batch of which its loader knows no more; None if some may be missing."""
        kept = self.count(batch)
        lists = [part for part in walk(batch) if isinstance(part, list | tuple) and len(part) == drawn > 0]
        shapes = [tuple(array.shape) for array in _arrays(batch) if array.ndim]
        is_list = any(is_array(part[0]) or values_of(part[0]) for part in lists)
        if is_list or drawn in max(shapes, key=math.prod, default=()):  # samples may be in another dimension
            return drawn
        if kept is None:
            rows = [shape[self.batch_dim] for shape in shapes if len(shape) > self.batch_dim]
            return None if max(rows, default=math.inf) <= drawn else drawn
        return min(kept, drawn)

    def weight(self, batch: Any) -> float:
        """Return the weight of the batch in a mean over ranks: its samples, or nan if they cannot be counted."""
        samples = self.count(batch)
        return math.nan if samples is None else samples

    def rounded(self, batch: Any) -> int | None:
        """Return `count` as an integer, because Lightning sums the counts in one dtype on all ranks."""
        samples = self.count(batch)
        return None if samples is None else round(samples)

    def count(self, batch: Any) -> float | None:
        """Return the number of samples drawn for the batch, else the size of its tensors; None if both are unknown."""
        if self._drawn is not None or isinstance(batch, Iterator):  # a step with `dataloader_iter` fetches its batch
            return self._drawn
        try:
            return float(count_samples(batch, self.batch_dim))
        except BatchSplitError as error:
            self.problem = error.problem
            return None


def sums_and_means(
    values: Tensor, weight: float | None, all_reduce: Callable[[Tensor], object]
) -> tuple[Tensor, Tensor]:
    """Return the sums and the weighted means of values over ranks in the widest type, with one reduction.

    If all weights are zero, or one is unknown (nan), average the ranks equally. A rank without values has the weight
    None, and is in no sum and no mean.
    """
    own = torch.zeros(2, len(values) + 1, dtype=widest_float(values.device), device=values.device)
    if weight is not None:
        own[0, :-1], own[0, -1] = values, 1.0
        # The loss of a batch without weight may be a mean over no samples, thus nan.
        own[1] = own[0] * weight if weight else 0.0
    all_reduce(own)
    equal, weighted = own[:, :-1] / own[:, -1:]
    return own[0, :-1], torch.where(own[1, -1] > 0, weighted, equal)


def as_indices(batch: Any) -> list[Any]:
    """Return the indices of a batch, or of a single sample, as a list."""
    values = batch.tolist() if hasattr(batch, "tolist") else batch
    return list(values) if isinstance(values, list | tuple) else [values]


def hash_of(indices: Any) -> int:
    """Return a hash of indices, the same for an array or tensor and for its list."""
    return zlib.crc32(repr(indices.tolist() if hasattr(indices, "tolist") else indices).encode())

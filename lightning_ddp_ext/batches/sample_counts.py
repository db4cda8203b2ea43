"""Samples of batches: their numbers, means over ranks that are weighted by them, and their indices."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext._devices import widest_float
from lightning_ddp_ext.batches.containers import is_array, walk
from lightning_ddp_ext.batches.splitting import count_samples
from lightning_ddp_ext.errors import BatchSplitError, WarnOnce


class DrawnSamples(int):
    """The number of samples that a loader has drawn for a batch, and the number in a list of them; else None."""

    held: int | None = None


def count_drawn(samples: Any, batch: Any, batch_size: int | None) -> DrawnSamples | None:
    """Return the number of samples that a collate function has received, see `iterate_counting`."""
    if not isinstance(samples, list):
        return None  # `__getitems__` of the dataset may return a table or a tuple of columns
    if len(samples) == 1 and batch is samples[0]:
        return None  # nothing was collated: the dataset has made the batch
    # The only sample of a last batch was collated as the samples of the batches before it.
    if batch_size == 1 and len(samples) == 1 and not _may_be_one_sample(batch):
        return None
    # Datasets return None for a broken sample, which the collate function skips.
    given = [sample for sample in samples if sample is not None]
    drawn = DrawnSamples(len(given))
    if given and _is_stack(given, batch):
        drawn.held = drawn
    elif held := {*map(id, _arrays(batch))}:  # a list of samples, maybe without some of them
        drawn.held = sum(not held.isdisjoint(map(id, _arrays(sample))) for sample in given) or None
    return drawn or None


def _is_stack(samples: Sequence[Any], batch: Any) -> bool:
    """Return True for a plain container of tensors that stack those of all samples, as most batches do."""
    parts, of_first = _items(batch), _items(samples[0])
    if not parts or any(type(part) is not Tensor or part.shape[:1] != (len(samples),) for part in parts):
        return False
    depth = max(part.ndim for part in parts) - 1
    return all(one.ndim <= depth if type(one) is Tensor else isinstance(one, int | float | str) for one in of_first)


def _items(value: Any) -> list[Any]:
    """Return the items of a plain container, or another value as a single item."""
    return [*value.values()] if type(value) is dict else [*value] if type(value) in (list, tuple) else [value]


def _may_be_one_sample(batch: Any) -> bool:
    """Return True if a batch has a dimension, list or tuple of size 1, or no arrays."""
    sizes = [size for array in _arrays(batch) for size in array.shape]
    return not sizes or 1 in sizes or any(isinstance(part, list | tuple) and len(part) == 1 for part in walk(batch))


def _arrays(value: Any) -> list[Any]:
    return _arrays_of(walk(value))


def _arrays_of(parts: Iterable[Any]) -> list[Any]:
    return [array for array in parts if is_array(array) and not getattr(array, "is_nested", False)]


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
        """Begin a batch with the drawn samples, None if unknown or at its end; a batch that holds fewer decides."""
        self._drawn = None
        held = drawn if drawn is None or batch is None else self._find_held(drawn, batch)
        self._drawn = drawn if held is None else held
        if drawn is not None and held != drawn:
            number = "an unknown number of" if held is None else f"{held:g}"
            self._warn(
                f"the loader has drawn {drawn:g} samples for a batch of {number} samples, so that the batch has weight"
                f" {self._drawn:g}. Ignore this if that is right. Otherwise pass a callable `weight_by` that counts"
                f" samples, or set `batch_dim` if they are not in dimension {self.batch_dim}."
            )

    def _find_held(self, drawn: float, batch: Any) -> float | None:
        """Return the number of drawn samples that a batch holds; None if samples may be missing."""
        held = getattr(drawn, "held", None)
        if held == drawn:
            return drawn
        parts = [*walk(batch)]
        graphs = [part.num_graphs for part in parts if isinstance(getattr(part, "num_graphs", None), int)]
        held = graphs[0] if graphs else held
        is_list = any(isinstance(part, list | tuple) and len(part) == drawn for part in parts)
        kept = held or (drawn if is_list else self.count(batch))
        shapes = [array.shape for array in _arrays_of(parts)]
        if kept is None:  # flat arrays, such as the boxes of all samples, have more rows
            return drawn if max((max(shape, default=0) for shape in shapes), default=math.inf) >= drawn else None
        if held is None and kept < drawn in max(shapes, key=math.prod, default=()):
            return None  # samples may be in another dimension
        return min(kept, drawn)  # a sample may have several rows

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

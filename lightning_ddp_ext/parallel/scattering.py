"""Cutting a nested batch into chunks."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_ddp_ext.errors import BatchSplitError
from lightning_ddp_ext.parallel.containers import is_array, is_record, items, map_items, rebuild

_REMEDY = (
    "Give every entry the same number of samples along `batch_dim`, or define `scatter_batch(batch, split)` on the"
    " module: it calls `split(number_of_samples)` for the chunk sizes and returns one chunk for each, None for size 0."
)
_NUMBERS = (int, float, complex)


def batch_size_of(batch: Any, batch_dim: int = 0) -> int:
    """Count the samples of a batch.

    Tensors and arrays have as many as their size along `batch_dim`; those without that dimension, numbers and strings
    belong to every sample. A list inside the batch may have one entry per sample instead (images of several sizes, the
    targets of a detection batch): where the rest of the batch says so, or where it holds mappings or lists that
    disagree in size. A batch that is a flat list without tensors has as many samples as entries.

    Args:
        batch: Tensors and arrays in nested mappings, dataclasses, lists, tuples and named tuples.
        batch_dim: The dimension that counts samples.

    Returns:
        The number of samples.

    Raises:
        BatchSplitError: If entries disagree or can be read in two ways, if one cannot be cut, or if there is nothing
            to count.
    """
    total = _measure(batch, batch_dim).total
    if total == 0:
        raise BatchSplitError("the batch has no samples. Leave empty batches out in the data loader.")
    return total


def split_batch(batch: Any, sizes: Sequence[int], batch_dim: int = 0) -> list[Any]:
    """Cut a batch into consecutive chunks.

    Chunks are views: nothing is copied or moved. What has no batch dimension is in every chunk.

    Args:
        batch: See `batch_size_of`.
        sizes: Chunk sizes; they add up to the size of the batch.
        batch_dim: The dimension that counts samples.

    Returns:
        One chunk of the type of the batch per size; None where the size is 0.

    Raises:
        BatchSplitError: See `batch_size_of`.
        ValueError: If the sizes do not add up.
    """
    cut = _measure(batch, batch_dim)
    if sum(sizes) != cut.total:
        raise ValueError(f"`sizes` must add up to the {cut.total} samples of the batch, got {list(sizes)}.")
    chunks: list[Any] = []
    start = 0
    for size in sizes:
        chunks.append(cut.chunk(batch, start, start + size) if size else None)
        start += size
    return chunks


class _Entry(NamedTuple):
    """A part of a batch that may count its samples.

    Attributes:
        path: Where it is in the batch.
        rows: Sizes that the arrays in it agree on; empty if there are none, or if they disagree.
        length: Entries of a list that may have one per sample; None for anything else.
        certain: Whether a list can only be meant that way.
        decides: Whether it holds arrays at all; a list of strings may also be a list of, say, class names.
    """

    path: str
    rows: tuple[int, ...]
    length: int | None = None
    certain: bool = False
    decides: bool = True

    def __str__(self) -> str:
        sizes = dict.fromkeys([*self.rows, *([] if self.length is None else [self.length])])
        return f"`{self.path}` has {' or '.join(map(str, sizes)) or 'no common size'}"


def _measure(batch: Any, batch_dim: int) -> "_Cut":
    """Find the size of a batch, and whether lists are cut by their entries or by the rows of their tensors."""
    found = list(_entries(batch, batch_dim, "batch", top=True))
    entries = [entry for entry in found if entry.decides]
    if not entries and isinstance(batch, list | tuple) and batch and not _holds_array(batch):
        return _Cut(len(batch), batch_dim, by_rows=False, flat=True)
    if not entries:
        raise BatchSplitError(
            f"the batch of type `{type(batch).__name__}` has no tensor with dimension {batch_dim} to split. {_REMEDY}"
        )
    rows = _common([entry.rows for entry in entries])
    length = _common([() if entry.length is None else (entry.length,) for entry in entries])
    if length is not None and any(entry.certain and entry.length == length for entry in found):
        return _Cut(length, batch_dim, by_rows=False)
    if rows is not None and length is None:
        return _Cut(rows, batch_dim, by_rows=True)
    tensors = _common([entry.rows for entry in entries if entry.length is None])
    if tensors is not None and all(tensors in (*entry.rows, entry.length) for entry in entries):
        return _Cut(tensors, batch_dim, by_rows=True)
    raise BatchSplitError(f"the batch size is ambiguous: {', '.join(map(str, entries))}. {_REMEDY}")


def _holds_array(value: Any) -> bool:
    return is_array(value) or any(_holds_array(item) for _, item in items(value))


def _common(sizes: Sequence[tuple[int, ...]]) -> int | None:
    """The first size that all have, or None."""
    return next((size for size in (sizes[0] if sizes else ()) if all(size in other for other in sizes)), None)


def _entries(value: Any, batch_dim: int, path: str, top: bool = False) -> Iterator[_Entry]:
    if is_array(value):
        if value.ndim > batch_dim:
            yield _Entry(path, (value.shape[batch_dim],))
        return
    inner = [entry for name, item in items(value) for entry in _entries(item, batch_dim, path + name)]
    if isinstance(value, list | tuple) and not is_record(value) and not top:
        yield from _list_entry(value, [entry for entry in inner if entry.decides], path)
        return
    yield from inner
    if not inner and any(isinstance(item, Tensor) for item in getattr(value, "__dict__", {}).values()):
        raise BatchSplitError(f"`{path}` of type `{type(value).__name__}` holds tensors but cannot be cut. {_REMEDY}")


def _list_entry(value: Any, inner: Sequence[_Entry], path: str) -> Iterator[_Entry]:
    if not inner:
        # A tuple of numbers is taken for one value, such as a shape.
        if isinstance(value, list) or not all(isinstance(item, _NUMBERS) for item in value):
            yield _Entry(path, (), len(value), certain=True, decides=False)
        return
    common = _common([entry.rows for entry in inner])
    rows = () if common is None else (common,)
    # Samples look alike: a pair of features and labels is no list of two samples.
    alike = len({(type(item), getattr(item, "ndim", None), getattr(item, "dtype", None)) for item in value}) == 1
    if alike or not rows:
        yield _Entry(path, rows, len(value), certain=not rows or not all(map(is_array, value)))
    else:
        yield _Entry(path, rows)


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    """How the parts of one batch are cut."""

    total: int
    batch_dim: int
    by_rows: bool
    flat: bool = False

    def chunk(self, batch: Any, start: int, stop: int) -> Any:
        if self.flat:
            return rebuild(batch, list(batch[start:stop]))
        if is_array(batch):
            return self.slice(batch, start, stop)
        return map_items(batch, lambda item: self.slice(item, start, stop))

    def slice(self, value: Any, start: int, stop: int) -> Any:
        if is_array(value):
            if 0 < value.ndim <= self.batch_dim and value.shape[0] == self.total:
                raise BatchSplitError(
                    f"a tensor of shape {tuple(value.shape)} has no dimension {self.batch_dim}, but as many entries as"
                    f" the batch has samples. {_REMEDY}"
                )
            if value.ndim <= self.batch_dim or value.shape[self.batch_dim] != self.total:
                return value
            return value[(slice(None),) * self.batch_dim + (slice(start, stop),)]
        if self._is_per_sample(value):
            return rebuild(value, list(value[start:stop]))
        return map_items(value, lambda item: self.slice(item, start, stop))

    def _is_per_sample(self, value: Any) -> bool:
        if not isinstance(value, list | tuple) or is_record(value) or len(value) != self.total:
            return False
        entries = list(_list_entry(value, self._arrays_in(value), ""))
        if not entries or entries[0].length is None:
            return False
        return not (self.by_rows and self.total in entries[0].rows)

    def _arrays_in(self, value: Any) -> list[_Entry]:
        inner = (entry for name, item in items(value) for entry in _entries(item, self.batch_dim, name))
        return [entry for entry in inner if entry.decides]

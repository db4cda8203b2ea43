"""Cutting batches into chunks, and putting chunks and outputs together again."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from enum import Enum
from numbers import Number
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_ddp_ext._compat.torch import equal_or_nan
from lightning_ddp_ext.batches.containers import (
    columns_of,
    have_same_items,
    is_array,
    is_object,
    is_record,
    items,
    rebuild,
    to_device,
    values_of,
    walk,
    with_values,
)
from lightning_ddp_ext.errors import BatchSplitError

_REMEDY = (
    "Give every entry the same number of samples along `batch_dim`, or define `scatter_batch(batch, split)` on the"
    " module: it calls `split(number_of_samples)` for the chunk sizes and returns one chunk for each, None for size 0."
    " Under `balanced_ddp`, ranks collate their own samples, and batches are not cut."
)
_JOINING_REMEDY = "Give all parts the same structure, and all samples the same shape: pad texts to one length."
_NUMBERS = (int, float, complex)
_KINDS = (Number, str | bytes, list | tuple, Mapping)
# Types of entries other than arrays and objects of dataclasses: all others may hold samples.
_CUTTABLE = (
    *(list, tuple, Mapping, str, bytes, Number, numpy.generic, type(None), type, Enum, PurePath, date, timedelta),
    *(torch.dtype, torch.device),
)
_MOST_NAMED = 6  # entries in a message: a list of samples may have hundreds


def count_samples(batch: Any, batch_dim: int = 0) -> int:
    """Count the samples of a batch, which may have none; raise a BatchSplitError if entries disagree."""
    return _measure(batch, batch_dim).total


def split_batch(batch: Any, sizes: Sequence[int] | Callable[[int], Sequence[int]], batch_dim: int = 0) -> list[Any]:
    """Cut a batch into consecutive chunks, None for size 0; values without a batch dimension are in every chunk.

    `sizes` may be a function of the number of samples, which is above 0 then.
    """
    cut = _measure(batch, batch_dim)
    if callable(sizes):
        if not cut.total:
            raise BatchSplitError("the batch has no samples. Leave empty batches out in the data loader.")
        sizes = sizes(cut.total)
    if sum(sizes) != cut.total:
        raise ValueError(f"`sizes` must add up to the {cut.total} samples of the batch, got {list(sizes)}.")
    chunks: list[Any] = []
    start = 0
    for size in sizes:
        chunks.append(cut.take(batch, start, start + size) if size else None)
        start += size
    return chunks


class _Entry(NamedTuple):
    """A part of a batch whose size may be the number of samples."""

    path: str
    rows: tuple[int, ...] = ()  # the size that the arrays in it agree on; empty without arrays, or if they disagree
    length: int | None = None  # number of entries of a list that may have one per sample
    certain: bool = False  # a list that can only have one entry per sample
    decides: bool = True  # holds arrays; a list of strings may also be a list of, say, class names
    one_value: bool = False  # a tuple of numbers, which may also be one value, such as a shape
    uncut: str | None = None  # type of an object in it that cannot be cut

    def __str__(self) -> str:
        if self.length in self.rows:
            return f"`{self.path}` has {self.length} entries of {self.length} rows"
        sizes = dict.fromkeys([*self.rows, *([] if self.length is None else [self.length])])
        return f"`{self.path}` has {' or '.join(map(str, sizes)) or 'no common size'}"


@dataclass(frozen=True, slots=True)
class _Cut:
    """How the parts of one batch are cut: lists with as many entries as samples by these, others by rows of arrays."""

    total: int
    batch_dim: int
    is_list: bool = False  # the batch itself is a list with one entry per sample

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """Take consecutive samples from the batch."""
        if self.is_list:
            return rebuild(batch, list(batch[start:stop]))
        if is_array(batch):
            return self._take(batch, start, stop)
        return with_values(batch, [self._take(item, start, stop) for item in values_of(batch)])  # its items are columns

    def _take(self, value: Any, start: int, stop: int) -> Any:
        if is_array(value):
            if value.ndim > self.batch_dim and value.shape[self.batch_dim] == self.total:
                return value[(slice(None),) * self.batch_dim + (slice(start, stop),)]
            if 0 < value.ndim <= self.batch_dim and value.shape[0] == self.total:
                raise BatchSplitError(
                    f"a tensor of shape {tuple(value.shape)} has no dimension {self.batch_dim}, but as many entries as"
                    " the batch has samples.",
                    _REMEDY,
                )
            return value
        if self.is_per_sample(value):
            return rebuild(value, list(value[start:stop]))
        return with_values(value, [self._take(item, start, stop) for item in values_of(value)])

    def is_per_sample(self, value: Any) -> bool:
        """Return True for a list with one entry per sample."""
        if not isinstance(value, list | tuple) or is_record(value) or len(value) != self.total:
            return False
        return any(entry.length is not None for entry in _entries(value, self.batch_dim, ""))


def _measure(batch: Any, batch_dim: int) -> _Cut:
    """Find the size of a batch, and check that each list can be read in one way."""
    if type(batch) in (tuple, list, dict):
        values = batch.values() if type(batch) is dict else batch
        if all(type(value) is Tensor and value.layout is torch.strided and not value.is_nested for value in values):
            names = tuple(batch) if type(batch) is dict else None
            forms = tuple((value.shape, value.dtype) for value in values)
            return _measure_tensors(batch.__class__, names, forms, batch_dim)
    return _measure_parts(batch, batch_dim)


@functools.lru_cache(maxsize=64)
def _measure_tensors(kind: type, names: Any, forms: Sequence[tuple[torch.Size, torch.dtype]], batch_dim: int) -> _Cut:
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in forms]
    return _measure_parts(kind(tensors if names is None else zip(names, tensors, strict=True)), batch_dim)


def _measure_parts(batch: Any, batch_dim: int) -> _Cut:
    found = list(_entries(batch, batch_dim, "batch", top=True))
    for entry in found:
        if entry.uncut and entry.length is None:
            raise BatchSplitError(f"`{entry.path}` of type `{entry.uncut}` cannot be cut.", _REMEDY)
    has_arrays = any(entry.decides for entry in found)
    cut = (_measure_arrays if has_arrays else _measure_lists)(batch, batch_dim, found)
    for entry in found:
        if 1 < cut.total == entry.length and entry.one_value:
            raise BatchSplitError(
                f"`{entry.path}`, a tuple of numbers, has as many entries as the batch has samples, but may be one"
                " value for all of them. Make it a list if each sample has one; otherwise leave it out of the batch, or"
                " make it a `torch.Size`."
            )
    return cut


def _measure_arrays(batch: Any, batch_dim: int, found: Sequence[_Entry]) -> _Cut:
    entries = [entry for entry in found if entry.decides]
    rows = _common([entry.rows for entry in entries])
    length = _common([() if entry.length is None else (entry.length,) for entry in entries])
    if isinstance(batch, list | tuple) and not is_record(batch) and len(batch) > 1:
        forms = {_form(item) for item in batch}
        if len(forms) == 1 and forms != {None}:  # the entries may be samples
            itself = _Entry("batch", () if rows is None else (rows,), len(batch))
            raise _ambiguous([itself, *(entries if rows is None else ())])
    if length is not None:
        lists = [entry for entry in found if entry.length == length]
        if any(entry.certain for entry in lists):
            if rows is not None and len(lists) == 1 and length > 1:
                raise _ambiguous(lists)
            return _Cut(length, batch_dim)
    total = rows if length is None else None
    if total is None:
        total = _common([entry.rows for entry in entries if entry.length is None])
    unclear = [entry for entry in entries if entry.rows == (entry.length,) != (1,)]
    if total is None or unclear or not all(total in (*entry.rows, entry.length) for entry in entries):
        raise _ambiguous(unclear or entries)
    return _Cut(total, batch_dim)


def _measure_lists(batch: Any, batch_dim: int, found: Sequence[_Entry]) -> _Cut:
    if isinstance(batch, list | tuple) and batch and not (is_record(batch) or any(map(is_array, walk(batch)))):
        given = [item for item in batch if item is not None]
        if all(isinstance(item, list | tuple) and _are_alike(item) for item in given):
            lengths = {len(item) for item in given}
            if len(lengths) == 1 and (len(batch), *lengths) != (1, 1):
                raise _ambiguous([_Entry("batch", tuple(lengths), len(batch))])
        # Entries of one kind are samples; entries of several kinds are columns, such as texts and one number for all.
        if len({next((kind for kind in _KINDS if isinstance(item, kind)), object) for item in given}) <= 1:
            return _Cut(len(batch), batch_dim, is_list=True)
    lists = [entry for entry in found if entry.certain]
    length = _common([(entry.length,) for entry in lists if entry.length is not None])
    if length is not None:
        return _Cut(length, batch_dim)
    if lists:
        raise _ambiguous(lists)
    raise BatchSplitError(
        f"the batch of type `{type(batch).__name__}` has no tensor with dimension {batch_dim} to split.", _REMEDY
    )


def _ambiguous(entries: Sequence[_Entry]) -> BatchSplitError:
    named = [*map(str, entries[:_MOST_NAMED]), *(["..."] if len(entries) > _MOST_NAMED else [])]
    return BatchSplitError(f"the batch size is ambiguous: {', '.join(named)}.", _REMEDY)


def _common(sizes: Sequence[tuple[int, ...]]) -> int | None:
    """Return the first size that all entries have, or None."""
    return next((size for size in (sizes[0] if sizes else ()) if all(size in other for other in sizes)), None)


def _form(value: Any) -> Any:
    """Return the form of a value that looks like a sample: a mapping, an object or a mixed tuple; None otherwise."""
    if isinstance(value, Mapping):
        return type(value), frozenset(value)
    if is_object(value) or is_record(value):
        return type(value)
    if isinstance(value, list | tuple) and not is_array(value) and not _are_alike(value):
        return type(value), len(value)
    return None


def _are_alike(values: Sequence[Any]) -> bool:
    """Return True for entries of one kind, and False for a pair of, say, features and labels."""
    return len({(type(item), getattr(item, "ndim", None), getattr(item, "dtype", None)) for item in values}) <= 1


def _entries(value: Any, batch_dim: int, path: str, top: bool = False) -> Iterator[_Entry]:
    if is_array(value) and _is_dense(value):
        if value.ndim > batch_dim:
            yield _Entry(path, (value.shape[batch_dim],))
        return
    if is_array(value) or isinstance(value, PackedSequence) or not (isinstance(value, _CUTTABLE) or is_object(value)):
        yield _Entry(path, uncut=str(value.layout) if isinstance(value, Tensor) else type(value).__name__)
        return
    inner = [entry for name, item in items(value) for entry in _entries(item, batch_dim, path + name)]
    if isinstance(value, list | tuple) and not is_record(value) and not top:
        entry = _list_entry(value, inner, path)
        yield from () if entry is None else (entry,)
    else:
        yield from inner


def _list_entry(value: Any, inner: Sequence[_Entry], path: str) -> _Entry | None:
    """Return the entry of a list that holds the entries `inner`; None for a shape."""
    deciding = [entry for entry in inner if entry.decides]
    if not deciding:
        if isinstance(value, torch.Size):
            return None
        one_value = isinstance(value, tuple) and all(isinstance(item, _NUMBERS) for item in value)
        return _Entry(path, (), len(value), certain=not one_value, decides=False, one_value=one_value)
    common = _common([entry.rows for entry in deciding])
    rows = () if common is None else (common,)
    if not _are_alike(value) and rows:
        return _Entry(path, rows)
    uncut = next((entry.uncut for entry in inner if entry.uncut), None)
    return _Entry(path, rows, len(value), certain=not rows or not all(map(is_array, value)), uncut=uncut)


def join_batches(parts: Sequence[Any], batch_dim: int = 0) -> Any:
    """Join batches along the batch dimension, the inverse of `split_batch`; raise a BatchSplitError if they differ."""
    sizes = [count_samples(part, batch_dim) for part in parts]
    joined = merge(parts, sizes, batch_dim, _same_value, "batch")
    fits = count_samples(joined, batch_dim) == sum(sizes)
    if not (fits and all(map(_are_equal, parts, split_batch(joined, sizes, batch_dim)))):
        raise BatchSplitError("the joined batch would be cut in another way than its parts.", _JOINING_REMEDY)
    return joined


def _same_value(values: Sequence[Any], sizes: Sequence[int], path: str) -> Any:
    if all(_are_equal(values[0], value) for value in values):
        return values[0]
    shown = dict.fromkeys(f"shape {tuple(value.shape)}" if is_array(value) else repr(value)[:40] for value in values)
    raise BatchSplitError(f"`{path}` cannot be joined, it is {' and '.join(shown)}.", _JOINING_REMEDY)


def _is_dense(array: Any) -> bool:
    return not isinstance(array, Tensor) or (array.layout == torch.strided and not array.is_nested)


def _are_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if is_array(one):
        same_form = one.shape == other.shape and one.dtype == other.dtype
        return same_form and bool(equal_or_nan(one, other).all())
    columns, others = dict(items(one)), dict(items(other))
    if columns or others:
        return columns.keys() == others.keys() and all(_are_equal(columns[name], others[name]) for name in columns)
    return bool(one == other)


def gather(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device, batch_dim: int = 0) -> Any:
    """Combine the outputs of the active replicas into the output that one device would return.

    Tensors and arrays with one row per sample are concatenated, along `batch_dim` or the first dimension that has the
    sizes of the chunks; scalars are averaged by chunk size; other values become a list with one entry per replica.
    """
    moved = [to_device(output, device) for output in outputs]
    return moved[0] if len(moved) == 1 else merge(moved, sizes, batch_dim, _mean_or_list)


def _mean_or_list(values: Sequence[Any], sizes: Sequence[int], path: str) -> Any:
    if all(isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point() for value in values):
        return sum(value * (size / sum(sizes)) for value, size in zip(values, sizes, strict=True))
    return None if all(value is None for value in values) else list(values)


def merge(
    values: Sequence[Any],
    sizes: Sequence[int],
    batch_dim: int,
    otherwise: Callable[[Sequence[Any], Sequence[int], str], Any],
    path: str = "",
) -> Any:
    """Concatenate arrays and lists with one row or entry per sample, at any depth; `otherwise` merges other values."""
    first = values[0]
    if is_array(first) and all(type(value) is type(first) and _is_dense(value) for value in values):
        least = min(value.ndim for value in values)
        for dim in dict.fromkeys((batch_dim, *range(least))):  # a later one, as in (draws, samples)
            others = {(*value.shape[:dim], *value.shape[dim + 1 :]) for value in values}
            if dim < least and [value.shape[dim] for value in values] == [*sizes] and len(others) == 1:
                return torch.cat([*values], dim) if isinstance(first, Tensor) else numpy.concatenate([*values], dim)
    elif isinstance(first, list | tuple) and all(type(value) is type(first) for value in values):
        lengths = [len(value) for value in values]
        if lengths == [*sizes] and not (len({*lengths}) == 1 and _is_columnar(values, sizes)):
            return rebuild(first, [item for value in values for item in value])
    if not is_array(first) and have_same_items(values):
        columns = columns_of(values).items()
        return with_values(first, [merge(one, sizes, batch_dim, otherwise, path + name) for name, one in columns])
    return otherwise(values, sizes, path)


def _is_columnar(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Return True for values with one row per sample each, and False for a list with one entry per sample."""
    pairs = [(item, size) for value, size in zip(values, sizes, strict=True) for item in value]
    if isinstance(values[0], tuple):
        arrays = [(part, size) for item, size in pairs for part in walk(item) if is_array(part) and part.ndim]
        have_rows = [size == len(part) for part, size in arrays]
        return any(have_rows) or not have_rows
    return all(is_array(item) and size in item.shape[:1] for item, size in pairs)

"""Cutting batches into chunks and gathering outputs."""

import dataclasses
import enum
import itertools
import operator
import types
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from numbers import Number
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_ddp_ext.batches.containers import (
    extra_names,
    fields,
    is_object,
    is_record,
    items,
    map_items,
    rebuild,
    rebuild_mapping,
    rebuild_object,
    to_device,
)
from lightning_ddp_ext.errors import BatchSplitError

_PLAIN = (str, bytes, int, float, complex, type(None), type, enum.Enum, types.FunctionType, types.ModuleType)
_DEPTH, _LOOKED_AT = 4, 100


def is_array(value: Any) -> bool:
    """Tell a tensor, an array, a packed sequence or a batch of graphs from anything else."""
    if isinstance(value, Tensor | PackedSequence) or (hasattr(value, "ndim") and hasattr(value, "shape")):
        return True
    return is_graph_batch(value)


def is_graph_batch(value: Any) -> bool:
    """Return True if a value can be taken apart into graphs and rebuilt from them, as PyTorch Geometric's `Batch`."""
    return hasattr(type(value), "to_data_list") and hasattr(type(value), "from_data_list")


def can_be_cut(array: Any) -> bool:
    """Tell whether rows can be taken from an array; compressed sparse tensors have none to take."""
    return not isinstance(array, Tensor) or array.layout in (torch.strided, torch.sparse_coo, torch.jagged)


def count_rows(array: Any, dim: int) -> int | None:
    """Count the samples in an array; None if it has no such dimension.

    A packed sequence and a nested tensor have as many as they have sequences, and a batch of graphs as many as it has
    graphs, whatever the dimension.
    """
    if is_graph_batch(array):
        return int(array.num_graphs) if hasattr(array, "num_graphs") else len(array.to_data_list())
    if isinstance(array, PackedSequence):
        return int(array.batch_sizes[0])
    if isinstance(array, Tensor) and array.is_nested:
        return array.size(0)
    return array.shape[dim] if array.ndim > dim else None


def may_be_one_sample(batch: Any) -> bool:
    """Return True if a batch has a dimension, list or tuple of size 1, or no arrays that could tell."""
    lengths: list[int] = []
    sizes: list[Any] = []

    def look(value: Any) -> None:
        if is_array(value):
            has_shape = not is_graph_batch(value) and not isinstance(value, PackedSequence)
            is_nested = isinstance(value, Tensor) and value.is_nested
            sizes.extend(value.shape if has_shape and not is_nested else [count_rows(value, 0)])
            return
        if isinstance(value, list | tuple):
            lengths.append(len(value))
        for _, item in items(value):
            look(item)

    look(batch)
    return not sizes or 1 in sizes or 1 in lengths


def take_rows(array: Any, dim: int, start: int, stop: int) -> Any:
    """Take consecutive samples from an array; a view, unless it is sparse, nested, packed or a batch of graphs."""
    if is_graph_batch(array):
        return _take_graphs(array, start, stop)
    if isinstance(array, PackedSequence):
        return pack_sequence(unpack_sequence(array)[start:stop], enforce_sorted=array.sorted_indices is None)
    if isinstance(array, Tensor) and array.is_nested:
        return torch.nested.as_nested_tensor(list(array.unbind())[start:stop], layout=array.layout)
    if isinstance(array, Tensor) and array.is_sparse:
        return array.narrow_copy(dim, start, stop - start)
    return array[start:stop] if dim == 0 else array[(slice(None),) * dim + (slice(start, stop),)]


def _take_graphs(batch: Any, start: int, stop: int) -> Any:
    if (start, stop) == (0, count_rows(batch, 0)):
        return batch
    if hasattr(batch, "get_example"):  # PyTorch Geometric's, which does not take the other graphs apart
        graphs = [batch.get_example(index) for index in range(start, stop)]
    else:
        graphs = batch.to_data_list()[start:stop]
    names = _keys(batch)
    # PyTorch Geometric's loaders add `<name>_batch` for each name in `follow_batch`; graphs do not keep it.
    followed = [name for name in names if f"{name}_batch" in names]
    chunk = type(batch).from_data_list(graphs, **({"follow_batch": followed} if followed else {}))
    if lost := sorted(names - _keys(chunk)):
        raise BatchSplitError(
            f"{', '.join(f'`{name}`' for name in lost)} of the batch of graphs does not belong to its graphs, so"
            " chunks would lose it. Set it on each graph before they are collated, or define"
            " `scatter_batch(batch, split)` on the module."
        )
    return chunk


def _keys(batch: Any) -> set[str]:
    keys = getattr(batch, "keys", ())
    return set(keys() if callable(keys) else keys)


def rows_of_graphs(chunk: Any) -> Iterator[int]:
    """Yield the numbers of nodes and edges in each batch of graphs of a chunk: outputs may have as many rows."""
    if is_graph_batch(chunk):
        yield from (getattr(chunk, name) for name in ("num_nodes", "num_edges") if hasattr(chunk, name))
    for _, item in items(chunk):
        yield from rows_of_graphs(item)


def hides_array(value: Any, depth: int = _DEPTH) -> bool:
    """Tell whether an array is found in an object, its attributes or its entries, not too deep inside."""
    if isinstance(value, _PLAIN):
        return False
    if is_array(value):
        return True
    if depth == 0:
        return False
    slots = [name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    parts = itertools.chain(
        (item for _, item in items(value)),
        value if isinstance(value, Set | deque | UserList) else (),
        (getattr(value, name, None) for name in slots),
        getattr(value, "__dict__", {}).values(),
    )
    return any(hides_array(part, depth - 1) for part in itertools.islice(parts, _LOOKED_AT))


def _names(slots: Any) -> Any:
    return (slots,) if isinstance(slots, str) else slots


_REMEDY = (
    "Give every entry the same number of samples along `batch_dim`, or define `scatter_batch(batch, split)` on the"
    " module: it calls `split(number_of_samples)` for the chunk sizes and returns one chunk for each, None for size 0."
)
_NUMBERS = (int, float, complex)
_KINDS = (Number, str | bytes, list | tuple, Mapping)
_NAMED = 6  # a list of samples may have hundreds of entries


def batch_size_of(batch: Any, batch_dim: int = 0) -> int:
    """Count the samples of a batch.

    Tensors and arrays have as many as their size along `batch_dim`, packed sequences and nested tensors as many as they
    have sequences; tensors without that dimension, numbers and strings belong to every sample. A list inside the batch
    may have one entry per sample instead (images of several sizes, the targets of a detection batch): where the rest of
    the batch says so, or where it holds mappings or lists that disagree in size. In a batch without tensors lists count
    the samples, and a batch that is itself a list has as many as entries.

    Args:
        batch: Tensors and arrays in nested mappings, dataclasses, attrs classes, lists, tuples and named tuples.
        batch_dim: The dimension that counts samples.

    Returns:
        The number of samples.

    Raises:
        BatchSplitError: If entries disagree or can be read in two ways, if one cannot be cut, or if there is nothing
            to count.
    """
    total = count_samples(batch, batch_dim)
    if total == 0:
        raise BatchSplitError("the batch has no samples. Leave empty batches out in the data loader.")
    return total


def count_samples(batch: Any, batch_dim: int = 0) -> int:
    """Count the samples of a batch that may have none; otherwise as `batch_size_of`."""
    return _measure(batch, batch_dim).total


def split_batch(batch: Any, sizes: Sequence[int], batch_dim: int = 0) -> list[Any]:
    """Cut a batch into consecutive chunks.

    Chunks of dense tensors are views: nothing is copied or moved. What has no batch dimension is in every chunk.

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
        one_value: Whether it is a tuple of numbers, which may also be one value, such as a shape.
        uncut: Type of an object that cannot be cut, if it is one.
    """

    path: str
    rows: tuple[int, ...] = ()
    length: int | None = None
    certain: bool = False
    decides: bool = True
    one_value: bool = False
    uncut: str | None = None

    def __str__(self) -> str:
        if self.length in self.rows:
            return f"`{self.path}` has {self.length} entries of {self.length} rows"
        sizes = dict.fromkeys([*self.rows, *([] if self.length is None else [self.length])])
        return f"`{self.path}` has {' or '.join(map(str, sizes)) or 'no common size'}"


def _measure(batch: Any, batch_dim: int) -> "_Cut":
    """Find the size of a batch, and whether lists are cut by their entries or by the rows of their tensors."""
    found = list(_entries(batch, batch_dim, "batch", top=True))
    for entry in found:
        if entry.uncut and entry.length is None:
            raise BatchSplitError(f"`{entry.path}` of type `{entry.uncut}` holds tensors but cannot be cut.", _REMEDY)
    if any(entry.decides for entry in found):
        cut = _read(batch, batch_dim, found)
    else:
        cut = _read_without_arrays(batch, batch_dim, found)
    for entry in found:
        if 1 < cut.total == entry.length and (entry.uncut or (entry.one_value and cut.by_rows)):
            raise BatchSplitError(
                f"`{entry.path}`, a {entry.uncut or 'tuple of numbers'}, has as many entries as the batch has samples,"
                " but may be one value for all of them. Make it a list if each sample has one; otherwise leave it out"
                " of the batch, or make it a `torch.Size`."
            )
    return cut


def _read(batch: Any, batch_dim: int, found: Sequence[_Entry]) -> "_Cut":
    entries = [entry for entry in found if entry.decides]
    rows = _common([entry.rows for entry in entries])
    length = _common([() if entry.length is None else (entry.length,) for entry in entries])
    if _may_be_samples(batch):
        raise _ambiguous(
            [_Entry("batch", () if rows is None else (rows,), len(batch)), *(entries if rows is None else ())]
        )
    if length is not None:
        lists = [entry for entry in found if entry.length == length]
        if any(entry.certain for entry in lists):
            if rows is not None and len(lists) == 1 and length > 1:
                raise _ambiguous(lists)
            return _Cut(length, batch_dim, by_rows=False)
    total = rows if length is None else None
    if total is None:
        total = _common([entry.rows for entry in entries if entry.length is None])
    unclear = [entry for entry in entries if entry.certain and entry.rows == (entry.length,) != (1,)]
    if total is None or unclear or not all(total in (*entry.rows, entry.length) for entry in entries):
        raise _ambiguous(unclear or entries)
    return _Cut(total, batch_dim, by_rows=True)


def _read_without_arrays(batch: Any, batch_dim: int, found: Sequence[_Entry]) -> "_Cut":
    if isinstance(batch, list | tuple) and batch and not is_record(batch) and not hides_array(batch):
        given = [item for item in batch if item is not None]
        if all(isinstance(item, list | tuple) and _are_alike(item) for item in given):
            lengths = {len(item) for item in given}
            if len(lengths) == 1 and (len(batch), *lengths) != (1, 1):
                raise _ambiguous([_Entry("batch", tuple(lengths), len(batch))])
        # Samples are of one kind; anything else are columns, such as texts and a number for all of them.
        if len({_kind(item) for item in given}) <= 1:
            return _Cut(len(batch), batch_dim, by_rows=False, flat=True)
    lists = [entry for entry in found if entry.certain]
    length = _common([(entry.length,) for entry in lists if entry.length is not None])
    if length is not None:
        return _Cut(length, batch_dim, by_rows=False)
    if lists:
        raise _ambiguous(lists)
    raise BatchSplitError(
        f"the batch of type `{type(batch).__name__}` has no tensor with dimension {batch_dim} to split.", _REMEDY
    )


def _ambiguous(entries: Sequence[_Entry]) -> BatchSplitError:
    named = [*map(str, entries[:_NAMED]), *(["..."] if len(entries) > _NAMED else [])]
    return BatchSplitError(f"the batch size is ambiguous: {', '.join(named)}.", _REMEDY)


def _common(sizes: Sequence[tuple[int, ...]]) -> int | None:
    """The first size that all have, or None."""
    return next((size for size in (sizes[0] if sizes else ()) if all(size in other for other in sizes)), None)


def _may_be_samples(batch: Any) -> bool:
    """Tell whether the entries of a list look like samples: mappings, objects or mixed tuples of one form."""
    if not isinstance(batch, list | tuple) or is_record(batch) or len(batch) < 2:
        return False
    forms = {_form(item) for item in batch}
    return len(forms) == 1 and forms != {None}


def _form(value: Any) -> Any:
    if isinstance(value, Mapping):
        return type(value), frozenset(value)
    if is_object(value) or is_record(value):
        return type(value)
    if isinstance(value, list | tuple) and not is_array(value) and not _are_alike(value):
        return type(value), len(value)
    return None


def _kind(value: Any) -> Any:
    return next((kind for kind in _KINDS if isinstance(value, kind)), object)


def _are_alike(values: Sequence[Any]) -> bool:
    """Tell entries of one kind from a pair of, say, features and labels."""
    return len({(type(item), getattr(item, "ndim", None), getattr(item, "dtype", None)) for item in values}) <= 1


def _entries(value: Any, batch_dim: int, path: str, top: bool = False) -> Iterator[_Entry]:
    if is_array(value):
        rows = count_rows(value, batch_dim)
        if not can_be_cut(value):
            yield _Entry(path, uncut=str(value.layout))
        elif rows is not None:
            yield _Entry(path, (rows,))
        return
    inner = [entry for name, item in items(value) for entry in _entries(item, batch_dim, path + name)]
    if isinstance(value, list | tuple) and not is_record(value) and not top:
        yield from _list_entry(value, [entry for entry in inner if entry.decides], path)
    elif isinstance(value, list | tuple | Mapping) or is_object(value):
        yield from inner
    elif hides_array(value):
        yield _Entry(path, uncut=type(value).__name__)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield _Entry(path, length=len(value), decides=False, uncut=type(value).__name__)


def _list_entry(value: Any, inner: Sequence[_Entry], path: str) -> Iterator[_Entry]:
    if not inner:
        # A tuple of numbers may be one value, such as a shape.
        one_value = isinstance(value, tuple) and all(isinstance(item, _NUMBERS) for item in value)
        if not isinstance(value, torch.Size):
            yield _Entry(path, (), len(value), certain=not one_value, decides=False, one_value=one_value)
        return
    common = _common([entry.rows for entry in inner])
    rows = () if common is None else (common,)
    if _are_alike(value) or not rows:
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
            return self._slice_array(value, start, stop)
        if self._is_per_sample(value):
            return rebuild(value, list(value[start:stop]))
        return map_items(value, lambda item: self.slice(item, start, stop))

    def _slice_array(self, value: Any, start: int, stop: int) -> Any:
        rows = count_rows(value, self.batch_dim)
        if rows is None and value.ndim and value.shape[0] == self.total:
            raise BatchSplitError(
                f"a tensor of shape {tuple(value.shape)} has no dimension {self.batch_dim}, but as many entries as the"
                f" batch has samples.",
                _REMEDY,
            )
        return take_rows(value, self.batch_dim, start, stop) if rows == self.total else value

    def _is_per_sample(self, value: Any) -> bool:
        if not isinstance(value, list | tuple) or is_record(value) or len(value) != self.total:
            return False
        entries = list(_list_entry(value, self._arrays_in(value), ""))
        if not entries or entries[0].length is None:
            return False
        return not (self.by_rows and (self.total in entries[0].rows or entries[0].one_value))

    def _arrays_in(self, value: Any) -> list[_Entry]:
        inner = (entry for name, item in items(value) for entry in _entries(item, self.batch_dim, name))
        return [entry for entry in inner if entry.decides]


def join_batches(parts: Sequence[Any], batch_dim: int = 0) -> Any:
    """Join batches along the batch dimension: the inverse of `split_batch`.

    Args:
        parts: Batches of one form, see `batch_size_of`.
        batch_dim: The dimension that counts samples.

    Returns:
        One batch with the samples of all parts, in their order.

    Raises:
        BatchSplitError: If samples cannot be counted or differ in shape, or if a value that belongs to every sample
            differs.
    """
    cuts = [_measure(part, batch_dim) for part in parts]
    joined = _join(parts, cuts, "batch", top=True)
    sizes = [cut.total for cut in cuts]
    fits = count_samples(joined, batch_dim) == sum(sizes)
    if not (fits and all(map(_are_equal, parts, split_batch(joined, sizes, batch_dim)))):
        raise BatchSplitError("the joined batch would be cut in another way than its parts.", _JOINING_REMEDY)
    return joined


_JOINING_REMEDY = "Give all parts the same structure, and all samples the same shape: pad texts to one length."


def _join(values: Sequence[Any], cuts: Sequence[_Cut], path: str, top: bool = False) -> Any:
    first, dim = values[0], cuts[0].batch_dim

    def join_items(get: Callable[[Any], Any], name: str) -> Any:
        return _join([get(value) for value in values], cuts, path + name)

    if is_array(first):
        if all(
            _is_dense(value) and count_rows(value, dim) == cut.total for value, cut in zip(values, cuts, strict=True)
        ):
            shapes = {(*value.shape[:dim], *value.shape[dim + 1 :]) for value in values}
            if len(shapes) == 1:
                return torch.cat([*values], dim) if isinstance(first, Tensor) else numpy.concatenate([*values], dim)
    elif all((top and cut.flat) or cut._is_per_sample(value) for value, cut in zip(values, cuts, strict=True)):
        return rebuild(first, [item for value in values for item in value])
    elif len({(type(value), *(name for name, _ in items(value))) for value in values}) == 1:
        if isinstance(first, Mapping):
            joined = {key: join_items(operator.itemgetter(key), f"[{key!r}]") for key in first}
            extras = {name: join_items(operator.attrgetter(name), f".{name}") for name in extra_names(first)}
            return rebuild_mapping(first, joined, extras)
        if isinstance(first, list | tuple):
            return rebuild(first, [join_items(operator.itemgetter(n), f"[{n}]") for n in range(len(first))])
        if is_object(first):
            return rebuild_object(
                first, {name: join_items(operator.attrgetter(name), f".{name}") for name in fields(first)}
            )
    if all(_are_equal(first, value) for value in values):
        return first
    shown = dict.fromkeys(f"shape {tuple(value.shape)}" if _is_dense(value) else repr(value)[:40] for value in values)
    raise BatchSplitError(f"`{path}` cannot be joined, it is {' and '.join(shown)}.", _JOINING_REMEDY)


def _is_dense(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.layout == torch.strided and not value.is_nested
    return isinstance(value, numpy.ndarray)


def _are_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if _is_dense(one):
        same_form = one.shape == other.shape and one.dtype == other.dtype
        return same_form and bool(((one == other) | ((one != one) & (other != other))).all())  # also where both are nan
    columns, others = dict(items(one)), dict(items(other))
    if columns or others:
        return columns.keys() == others.keys() and all(_are_equal(columns[name], others[name]) for name in columns)
    return bool(one == other)


def gather(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    device: torch.device,
    batch_dim: int = 0,
    other_rows: Sequence[Sequence[int]] = (),
) -> Any:
    """Put the outputs of the replicas together as one device would have returned them.

    Tensors with one row per sample are concatenated in the order of the batch; floating-point tensors without
    dimensions are averaged by chunk size; lists with one entry per sample are joined; mappings, dataclasses, tuples
    and lists are gathered entry by entry. Values that fit none of these come back as a list with one entry per replica.

    Args:
        outputs: What each active replica returned.
        sizes: Chunk size of each of them.
        device: Where tensors are gathered.
        batch_dim: The dimension of tensors that counts samples.
        other_rows: Other numbers of rows that the tensors of each replica may have, such as one per node of its graphs.

    Returns:
        The gathered output.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return to_device(first, device)
    if isinstance(first, Tensor):
        return _gather_tensors([to_device(output, device) for output in outputs], sizes, batch_dim, other_rows)
    if isinstance(first, Mapping) and all(output.keys() == first.keys() for output in outputs):
        items = {
            key: gather([output[key] for output in outputs], sizes, device, batch_dim, other_rows) for key in first
        }
        return rebuild_mapping(first, items)
    if is_object(first):
        values = {name: [getattr(output, name, None) for output in outputs] for name in fields(first)}
        return rebuild_object(
            first, {name: gather(column, sizes, device, batch_dim, other_rows) for name, column in values.items()}
        )
    if isinstance(first, list | tuple):
        lengths = [len(output) for output in outputs]
        same_length = len(set(lengths)) == 1
        if lengths == list(sizes) and not (same_length and _is_columnar(outputs, sizes)):
            return rebuild(first, [to_device(item, device) for output in outputs for item in output])
        if same_length:
            columns = zip(*outputs, strict=True)
            return rebuild(first, [gather(column, sizes, device, batch_dim, other_rows) for column in columns])
    if all(output is None for output in outputs):
        return None
    return [to_device(output, device) for output in outputs]


def _is_columnar(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Tell a pair of tensors (one row per sample each) from a list with one entry per sample."""
    return isinstance(outputs[0], tuple) or all(
        isinstance(item, Tensor) and item.ndim > 0 and item.size(0) == size
        for output, size in zip(outputs, sizes, strict=True)
        for item in output
    )


def _gather_tensors(
    tensors: Sequence[Tensor], sizes: Sequence[int], batch_dim: int, other_rows: Sequence[Sequence[int]]
) -> Any:
    if all(tensor.ndim == 0 and tensor.is_floating_point() for tensor in tensors):
        total = sum(sizes)
        return sum(tensor * (size / total) for tensor, size in zip(tensors, sizes, strict=True))
    for dim, rows in [(batch_dim, sizes), (0, sizes), *((0, rows) for rows in other_rows)]:
        if all(tensor.ndim > dim and tensor.size(dim) == size for tensor, size in zip(tensors, rows, strict=True)):
            return torch.cat(list(tensors), dim)
    return list(tensors)

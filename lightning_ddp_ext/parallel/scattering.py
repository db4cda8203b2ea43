"""Cutting a nested batch into chunks, and putting the replicas' outputs together again."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_ext.errors import BatchSplitError

_REMEDY = (
    "Give every entry the same number of samples along `batch_dim`, or define `scatter_batch(batch, split)` on the"
    " module: it calls `split(number_of_samples)` for the chunk sizes and returns one chunk for each, None for size 0."
)
_NUMBERS = (int, float, complex)


def batch_size_of(batch: Any, batch_dim: int = 0) -> int:
    """Count the samples of a batch.

    Tensors and arrays have as many as their size along `batch_dim`; those without that dimension, numbers and strings
    belong to every sample. A list inside the batch may also have one entry per sample (the targets of a detection
    batch), where that is what the rest of the batch agrees with. A batch that is a flat list without tensors has as
    many samples as entries.

    Args:
        batch: Tensors and arrays in nested mappings, dataclasses, lists, tuples and named tuples.
        batch_dim: The dimension that counts samples.

    Returns:
        The number of samples.

    Raises:
        BatchSplitError: If entries disagree, if one cannot be cut, or if there is nothing to count.
    """
    entries = list(_entries(batch, batch_dim, "batch", top=True))
    if not entries and isinstance(batch, list | tuple) and batch:
        return len(batch)
    if not entries:
        raise BatchSplitError(
            f"the batch of type `{type(batch).__name__}` has no tensor with dimension {batch_dim} to split. {_REMEDY}"
        )
    # The length of a list counts only beside an entry that has no other size: a pair of tensors is no list of samples.
    lengths_count = any(len(entry.sizes) == 1 for entry in entries)
    for size in entries[0].sizes:
        if all(size in (entry.sizes if lengths_count else entry.rows) for entry in entries):
            return size
    listed = ", ".join(f"`{entry.path}` has {' or '.join(map(str, entry.sizes))}" for entry in entries)
    raise BatchSplitError(f"the batch size is ambiguous: {listed}. {_REMEDY}")


def split_batch(batch: Any, sizes: Sequence[int], batch_dim: int = 0) -> list[Any]:
    """Cut a batch into consecutive chunks.

    Chunks are views: nothing is copied or moved. What has no batch dimension is in every chunk.

    Args:
        batch: See `batch_size_of`.
        sizes: Chunk sizes; they add up to the size of the batch.
        batch_dim: The dimension that counts samples.

    Returns:
        One chunk of the type of the batch per size; None where the size is 0.
    """
    total = sum(sizes)
    entries = list(_entries(batch, batch_dim, "batch", top=True))
    # A list of as many tensors as they have rows (three images of three channels) is cut like the rest of the batch.
    by_rows = any(entry.length is None for entry in entries) or all(total in entry.rows for entry in entries)
    cut = _Cut(total, batch_dim, by_rows)
    chunks: list[Any] = []
    start = 0
    for size in sizes:
        chunks.append(cut.slice(batch, start, start + size) if size else None)
        start += size
    return chunks


class _Entry(NamedTuple):
    """A part of a batch that may count its samples: an array, or a list that may have one entry per sample."""

    path: str
    rows: tuple[int, ...]  # sizes that the arrays in it agree on
    length: int | None  # number of entries of a list

    @property
    def sizes(self) -> tuple[int, ...]:
        """Possible numbers of samples, rows of arrays first."""
        return self.rows if self.length is None else tuple(dict.fromkeys((*self.rows, self.length)))


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or (hasattr(value, "ndim") and hasattr(value, "shape"))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_record(value: Any) -> bool:
    """Tell a named tuple, whose items are fields, from other sequences, whose items may be samples."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of each item of a container; nothing for anything else."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif _is_dataclass(value):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))


def _entries(value: Any, batch_dim: int, path: str, top: bool = False) -> Iterator[_Entry]:
    if _is_array(value):
        if value.ndim > batch_dim:
            yield _Entry(path, (value.shape[batch_dim],), None)
        return
    inner = [entry for name, item in _items(value) for entry in _entries(item, batch_dim, path + name)]
    if isinstance(value, list | tuple) and not _is_record(value) and not top and inner:
        rows = tuple(size for size in inner[0].sizes if all(size in entry.sizes for entry in inner))
        yield _Entry(path, rows, len(value))
        return
    yield from inner
    if not inner and any(isinstance(item, Tensor) for item in getattr(value, "__dict__", {}).values()):
        raise BatchSplitError(f"`{path}` of type `{type(value).__name__}` holds tensors but cannot be cut. {_REMEDY}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    """How the parts of one batch are cut."""

    total: int
    batch_dim: int
    by_rows: bool

    def slice(self, value: Any, start: int, stop: int) -> Any:
        if _is_array(value):
            if value.ndim <= self.batch_dim or value.shape[self.batch_dim] != self.total:
                return value
            return value[(slice(None),) * self.batch_dim + (slice(start, stop),)]
        if self._is_per_sample(value):
            return _rebuild(value, list(value[start:stop]))
        return _map_items(value, lambda item: self.slice(item, start, stop))

    def _is_per_sample(self, value: Any) -> bool:
        if not isinstance(value, list | tuple) or _is_record(value) or len(value) != self.total:
            return False
        inner = [entry for name, item in _items(value) for entry in _entries(item, self.batch_dim, name)]
        if not inner:  # a tuple of numbers is taken for one value, such as a shape
            return isinstance(value, list) or not all(isinstance(item, _NUMBERS) for item in value)
        return not (self.by_rows and all(self.total in entry.sizes for entry in inner))


def _map_items(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the items of a container; anything else is returned as it is."""
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, {key: function(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return _rebuild(value, [function(item) for item in value])
    if _is_dataclass(value):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, function(getattr(value, field.name)))  # also of frozen ones
        return copied
    return value


def _rebuild(value: Any, items: list[Any]) -> Any:
    return type(value)(*items) if _is_record(value) else type(value)(items)


def _rebuild_mapping(value: Any, items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    if not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    copied = copy.copy(value)  # keeps what a subclass adds, such as a default factory
    for key, item in items.items():
        copied[key] = item
    return copied


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors of a nested value to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return _map_items(value, lambda item: to_device(item, device))


def gather(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device, batch_dim: int = 0) -> Any:
    """Put the outputs of the replicas together as one device would have returned them.

    Tensors with one row per sample are concatenated in the order of the batch; floating-point tensors without
    dimensions are averaged by chunk size; lists with one entry per sample are joined; mappings, dataclasses, tuples
    and lists are gathered entry by entry. Values that fit none of these come back as a list with one entry per replica.

    Args:
        outputs: What each active replica returned.
        sizes: Chunk size of each of them.
        device: Where tensors are gathered.
        batch_dim: The dimension of tensors that counts samples.

    Returns:
        The gathered output.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return to_device(first, device)
    if isinstance(first, Tensor):
        return _gather_tensors([to_device(output, device) for output in outputs], sizes, batch_dim)
    if isinstance(first, Mapping) and all(output.keys() == first.keys() for output in outputs):
        items = {key: gather([output[key] for output in outputs], sizes, device, batch_dim) for key in first}
        return _rebuild_mapping(first, items)
    if _is_dataclass(first):
        gathered = copy.copy(first)
        for field in dataclasses.fields(first):
            values = [getattr(output, field.name) for output in outputs]
            object.__setattr__(gathered, field.name, gather(values, sizes, device, batch_dim))
        return gathered
    if isinstance(first, list | tuple):
        lengths = [len(output) for output in outputs]
        same_length = len(set(lengths)) == 1
        if lengths == list(sizes) and not (same_length and _is_columnar(outputs, sizes)):
            return _rebuild(first, [to_device(item, device) for output in outputs for item in output])
        if same_length:
            columns = zip(*outputs, strict=True)
            return _rebuild(first, [gather(column, sizes, device, batch_dim) for column in columns])
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


def _gather_tensors(tensors: Sequence[Tensor], sizes: Sequence[int], batch_dim: int) -> Any:
    if all(tensor.ndim == 0 and tensor.is_floating_point() for tensor in tensors):
        total = sum(sizes)
        return sum(tensor * (size / total) for tensor, size in zip(tensors, sizes, strict=True))
    for dim in dict.fromkeys((batch_dim, 0)):
        if all(tensor.ndim > dim and tensor.size(dim) == size for tensor, size in zip(tensors, sizes, strict=True)):
            return torch.cat(list(tensors), dim)
    return list(tensors)

"""The containers and arrays that batches and outputs are made of."""

import copy
import dataclasses
import enum
import itertools
import sys
import types
from collections import UserDict, UserList, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_ddp_ext.errors import BatchSplitError

_PLAIN = (str, bytes, int, float, complex, type(None), type, enum.Enum, types.FunctionType, types.ModuleType)
_DEPTH, _MOST_PARTS = 4, 100  # limits of the search for arrays in an object


def is_record(value: Any) -> bool:
    """Return True for a named tuple, whose items are fields; items of other sequences may be samples."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_object(value: Any) -> bool:
    """Return True for an instance of a dataclass or of an attrs class."""
    if isinstance(value, type):
        return False
    return dataclasses.is_dataclass(value) or hasattr(type(value), "__attrs_attrs__")


def fields(value: Any) -> Iterator[str]:
    """Yield the names of an instance's fields that have a value, and of its other attributes."""
    declared = dataclasses.fields(value) if dataclasses.is_dataclass(value) else type(value).__attrs_attrs__
    names = dict.fromkeys([*(field.name for field in declared), *getattr(value, "__dict__", ())])
    return (name for name in names if hasattr(value, name))


def items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each item of a container; nothing for any other value."""
    if isinstance(value, Tensor):  # first, because most values are
        return
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
        yield from ((f".{name}", getattr(value, name)) for name in extra_names(value))
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif is_object(value):
        yield from ((f".{name}", getattr(value, name)) for name in fields(value))


def values_of(value: Any) -> list[Any]:
    """Return the items of a container without their paths, in the order of `items`."""
    if isinstance(value, Tensor):
        return []
    if isinstance(value, Mapping):
        return [*value.values(), *(getattr(value, name) for name in extra_names(value))]
    if isinstance(value, list | tuple):
        return [*value]
    return [getattr(value, name) for name in fields(value)] if is_object(value) else []


def walk(value: Any) -> Iterator[Any]:
    """Yield a value and, in any depth, the items of its containers."""
    yield value
    for item in values_of(value):
        yield from walk(item)


def with_values(value: Any, values: Sequence[Any]) -> Any:
    """Make a container like `value` with other items, in the order of `values_of`; return any other value unchanged."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, values)
    if isinstance(value, list | tuple):
        return rebuild(value, values)
    if not values:
        return value
    copied = copy.copy(value)  # an object, without running the constructor
    for name, item in zip(fields(value), values, strict=True):
        object.__setattr__(copied, name, item)  # works for frozen classes, too
    return copied


def columns_of(values: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the items of containers for which `have_same_items` is True, by their paths in the first one."""
    by_path = [dict(items(value)) for value in values]
    return {path: [columns[path] for columns in by_path] for path in by_path[0]}


def have_same_items(values: Sequence[Any]) -> bool:
    """Return True for containers of one type that have items under the same paths."""
    first = values[0]
    is_container = isinstance(first, Mapping | list | tuple) or is_object(first)
    return is_container and len({(type(value), frozenset(path for path, _ in items(value))) for value in values}) == 1


def rebuild(value: Any, items: Sequence[Any]) -> Any:
    """Make a sequence of the type of `value` from any number of other items."""
    if isinstance(value, list) and type(value) is not list:
        copied = copy.copy(value)  # a subclass may have attributes, and a constructor with other arguments
        copied[:] = items
        return copied
    return type(value)(*items) if is_record(value) else type(value)(items)


def _rebuild_mapping(value: Any, values: Sequence[Any]) -> Any:
    entries = dict(zip(value, values, strict=False))  # attributes follow the entries
    if type(value) is dict:
        return entries
    if not isinstance(value, dict | UserDict):
        return type(value)(entries)
    copied = copy.copy(value)  # keeps additions of a subclass, such as a default factory
    for name, extra in zip(extra_names(value), values[len(value) :], strict=True):
        setattr(copied, name, extra)
    for key, item in entries.items():
        copied[key] = item
    return copied


def extra_names(value: Any) -> Iterator[str]:
    """Yield the names of a mapping's attributes, such as the encodings of HuggingFace's tokenizers."""
    if not isinstance(value, dict | UserDict):
        return iter(())
    storage = "data" if isinstance(value, UserDict) else None
    return (name for name in getattr(value, "__dict__", ()) if name != storage and name not in value)


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors of a nested value to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, PackedSequence):
        return value.to(device)  # type: ignore[arg-type]  # its batch sizes stay on the CPU
    return with_values(value, [to_device(item, device) for item in values_of(value)])


def is_array(value: Any) -> bool:
    """Return True for a tensor, an array, a packed sequence or a batch of graphs."""
    if isinstance(value, Tensor | PackedSequence) or (hasattr(value, "ndim") and hasattr(value, "shape")):
        return not is_index(value)
    return is_graph_batch(value)


def is_index(value: Any) -> bool:
    """Return True for an index of pandas, which names columns or rows."""
    return isinstance(value, getattr(sys.modules.get("pandas"), "Index", ()))


def is_graph_batch(value: Any) -> bool:
    """Return True for a batch that can be divided into graphs and rebuilt, as PyTorch Geometric's `Batch`."""
    kind = type(value)
    return kind is not Tensor and hasattr(kind, "to_data_list") and hasattr(kind, "from_data_list")


def count_rows(array: Any, dim: int) -> int | None:
    """Count the samples, sequences or graphs in an array; None if it has no dimension `dim`."""
    if is_graph_batch(array):
        return int(array.num_graphs) if hasattr(array, "num_graphs") else len(array.to_data_list())
    if isinstance(array, PackedSequence):
        return int(array.batch_sizes[0])
    if isinstance(array, Tensor) and array.is_nested:
        return array.size(0)
    return array.shape[dim] if array.ndim > dim else None


def take_rows(array: Any, dim: int, start: int, stop: int) -> Any:
    """Take consecutive samples from an array: a view if it is dense, a copy otherwise."""
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
    if hasattr(batch, "get_example"):  # PyTorch Geometric's, which does not build the other graphs
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


def hides_array(value: Any, depth: int = _DEPTH) -> bool:
    """Return True if an array is found in an object, in its attributes or entries, down to a few levels."""
    if isinstance(value, _PLAIN):
        return False
    if is_array(value):
        return True
    if depth == 0:
        return False
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = itertools.chain.from_iterable((slot,) if isinstance(slot, str) else slot for slot in slots)
    parts = itertools.chain(
        values_of(value),
        value if isinstance(value, Set | deque | UserList) else (),
        (getattr(value, name, None) for name in names),
        getattr(value, "__dict__", {}).values(),
    )
    return any(hides_array(part, depth - 1) for part in itertools.islice(parts, _MOST_PARTS))

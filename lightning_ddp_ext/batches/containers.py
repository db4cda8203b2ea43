"""The containers and arrays that batches and outputs are made of."""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


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
    """Return True for a tensor or a NumPy array."""
    return isinstance(value, Tensor | numpy.ndarray)

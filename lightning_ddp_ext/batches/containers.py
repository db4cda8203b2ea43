"""The containers that batches and outputs are made of, item by item."""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def is_record(value: Any) -> bool:
    """Tell a named tuple, whose items are fields, from other sequences, whose items may be samples."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_object(value: Any) -> bool:
    """Tell an instance of a dataclass or of an attrs class."""
    if isinstance(value, type):
        return False
    return dataclasses.is_dataclass(value) or hasattr(type(value), "__attrs_attrs__")


def fields(value: Any) -> Iterator[str]:
    """Names of the fields that an instance has, and of attributes that were set on it beside them."""
    declared = dataclasses.fields(value) if dataclasses.is_dataclass(value) else type(value).__attrs_attrs__
    names = dict.fromkeys([*(field.name for field in declared), *getattr(value, "__dict__", ())])
    return (name for name in names if hasattr(value, name))


def items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each item of a container; nothing for anything else."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
        yield from ((f".{name}", getattr(value, name)) for name in extra_names(value))
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif is_object(value):
        yield from ((f".{name}", getattr(value, name)) for name in fields(value))


def map_items(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the items of a container; anything else is returned as it is."""
    if isinstance(value, Mapping):
        extras = {name: function(getattr(value, name)) for name in extra_names(value)}
        return rebuild_mapping(value, {key: function(item) for key, item in value.items()}, extras)
    if isinstance(value, list | tuple):
        return rebuild(value, [function(item) for item in value])
    if is_object(value):
        return rebuild_object(value, {name: function(getattr(value, name)) for name in fields(value)})
    return value


def rebuild(value: Any, items: list[Any]) -> Any:
    """Make a sequence of the type of `value` from other items."""
    if isinstance(value, list) and type(value) is not list:
        copied = copy.copy(value)  # a subclass may have attributes, and a constructor of its own
        copied[:] = items
        return copied
    return type(value)(*items) if is_record(value) else type(value)(items)


def rebuild_mapping(value: Any, items: dict[Any, Any], extras: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Make a mapping of the type of `value` from other items, and other attributes beside them."""
    if type(value) is dict:
        return items
    if not isinstance(value, MutableMapping):
        return type(value)(items)
    copied = copy.copy(value)  # keeps what a subclass adds, such as a default factory
    if not isinstance(value, dict | UserDict):
        for name, storage in getattr(copied, "__dict__", {}).items():
            if isinstance(storage, MutableMapping | list):
                setattr(copied, name, copy.copy(storage))  # where such a class keeps its items, which a copy shares
    for name, extra in extras.items():
        setattr(copied, name, extra)
    for key, item in items.items():
        copied[key] = item
    return copied


def rebuild_object(value: Any, fields: Mapping[str, Any]) -> Any:
    """Make an instance of the class of `value` with other fields, without running its constructor."""
    copied = copy.copy(value)
    for name, item in fields.items():
        object.__setattr__(copied, name, item)  # also of frozen ones
    return copied


def extra_names(value: Any) -> Iterator[str]:
    """Names of the attributes of a mapping beside its items, such as the encodings of HuggingFace's tokenizers."""
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
    return map_items(value, lambda item: to_device(item, device))

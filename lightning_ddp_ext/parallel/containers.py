"""The containers that batches and outputs are made of, item by item."""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def is_array(value: Any) -> bool:
    """Tell a tensor or an array from anything else."""
    return isinstance(value, Tensor) or (hasattr(value, "ndim") and hasattr(value, "shape"))


def is_dataclass(value: Any) -> bool:
    """Tell an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_record(value: Any) -> bool:
    """Tell a named tuple, whose items are fields, from other sequences, whose items may be samples."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each item of a container; nothing for anything else."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif is_dataclass(value):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))


def map_items(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the items of a container; anything else is returned as it is."""
    if isinstance(value, Mapping):
        return rebuild_mapping(value, {key: function(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return rebuild(value, [function(item) for item in value])
    if is_dataclass(value):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, function(getattr(value, field.name)))  # also of frozen ones
        return copied
    return value


def rebuild(value: Any, items: list[Any]) -> Any:
    """Make a sequence of the type of `value` from other items."""
    return type(value)(*items) if is_record(value) else type(value)(items)


def rebuild_mapping(value: Any, items: dict[Any, Any]) -> Any:
    """Make a mapping of the type of `value` from other items."""
    if type(value) is dict:
        return items
    if isinstance(value, defaultdict):
        return type(value)(value.default_factory, items)
    if not isinstance(value, MutableMapping):
        return type(value)(items)
    copied = copy.copy(value)  # keeps what a subclass adds, such as a default factory
    for key, item in items.items():
        copied[key] = item
    return copied


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors of a nested value to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return map_items(value, lambda item: to_device(item, device))

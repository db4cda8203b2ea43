"""Values as bytes for other ranks: written by `torch.save`, read with `weights_only=True`, which runs no code.

Pickle alone would let anyone who reaches the port of a rank run code there.
"""

import io
import sys
import threading
import warnings
from collections import UserDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_ddp_ext.batches.containers import extra_names, fields, is_object, is_record, items

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_NUMBERS = "biufc"  # kinds of numpy's dtypes
_FACTORIES = (bool, int, float, str, list, tuple, dict, set)  # of values of a `defaultdict`
_LOCK = threading.Lock()  # the functions that torch allows are a setting of the process


@dataclass(frozen=True, slots=True)
class Packed:
    """A serialised value."""

    data: Tensor  # bytes on the CPU
    skipped: dict[str, Any]  # objects that cannot be sent, by their place in the value, empty for the whole value


def pack(value: Any) -> Packed:
    """Serialise tensors, arrays of numbers, plain values and containers of these; other objects are skipped."""
    skipped: dict[str, Any] = {}
    encoded = _encode(value, "", skipped)
    file = io.BytesIO()
    torch.save((encoded, {place: type(found).__name__ for place, found in skipped.items()}), file)
    return Packed(torch.frombuffer(file.getbuffer(), dtype=torch.uint8), skipped)


def unpack(data: Tensor, fill: Mapping[str, Any] = MappingProxyType({})) -> tuple[Any, dict[str, str]]:
    """Return a value, and the class names of skipped objects by place; `fill.get(place)` takes the place of each."""
    allowed: list[Any] = [_rebuild, _to_array, frozenset, deque, *_FACTORIES, (fill.get, f"{__name__}._fill")]
    with _LOCK, warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants")  # torch 2.14 says that it takes time
        value, skipped = torch.load(io.BytesIO(data.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)
    return value, skipped


def name_skipped(skipped: Mapping[str, Any]) -> str:
    """Name the first skipped object and its place, and the number of further ones."""
    place, found = next(iter(skipped.items()))
    kind = found if isinstance(found, str) else type(found).__name__
    more = f" and {len(skipped) - 1} more" if len(skipped) > 1 else ""
    return f"`{kind}`{f' at `{place}`' if place else ''}{more}"


class _Call:
    """An object that is read as the result of a function that `unpack` allows."""

    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        function, *arguments = self._reduced
        return function, tuple(arguments)


def _encode(value: Any, place: str, skipped: dict[str, Any]) -> Any:
    """Replace the objects that `weights_only=True` would refuse by calls that make them again."""
    kind = type(value)
    if kind in _PLAIN or (kind is type and value in _FACTORIES):
        return value
    if isinstance(value, numpy.generic) and _is_number(value.dtype):
        return _Call(_rebuild, f"numpy:{kind.__name__}", [value.item()], [], [])
    for base in () if isinstance(value, Enum) else (str, int, float):
        if isinstance(value, base):
            return base(value)  # such as torch's version, whose class is its own
    if isinstance(value, numpy.ndarray) and _is_number(value.dtype):
        return _Call(_to_array, torch.from_numpy(value.copy()))
    if isinstance(value, Tensor) and not value.is_nested and not value.is_meta:
        plain = value.detach()
        plain = plain if type(plain) is Tensor else plain.as_subclass(Tensor)
        return plain.cpu().clone()  # of a view, `torch.save` writes the whole storage
    if kind in (set, frozenset):
        return kind(_encode(item, place, skipped) for item in value)
    if kind is deque:
        return _Call(deque, [_encode(item, f"{place}[{at}]", skipped) for at, item in enumerate(value)], value.maxlen)
    parts = [_encode(item, place + suffix, skipped) for suffix, item in items(value)]
    is_mapping = isinstance(value, dict | UserDict)
    keys = [_encode(key, f"{place}[{key!r}], the key", skipped) for key in value] if is_mapping else []
    if kind in (list, tuple):
        return kind(parts)
    if kind is dict:
        return dict(zip(keys, parts, strict=True))
    path = f"{kind.__module__}:{kind.__qualname__}"
    if _look_up(path) is kind:
        if isinstance(value, Enum) and value.name in kind.__members__:  # not a combination of flags
            return _Call(_rebuild, path, [value.name], [], [])
        if is_mapping or is_object(value):
            names = list(extra_names(value) if is_mapping else fields(value))
            if isinstance(value, defaultdict):
                names.append("default_factory")
                parts.append(_encode(value.default_factory, f"{place}.default_factory", skipped))
            return _Call(_rebuild, path, parts, keys, names)
        if isinstance(value, list) or is_record(value):
            return _Call(_rebuild, path, parts, [], [])
    skipped[place] = value
    return _Call(_fill, place)


def _is_number(dtype: Any) -> bool:
    return dtype.kind in _NUMBERS and dtype.isnative and dtype.itemsize <= 8 * (1 + (dtype.kind == "c"))


def _fill(place: str) -> None:
    """Name a skipped object in the data; `unpack` calls the getter of its values instead."""


def _to_array(tensor: Tensor) -> Any:
    return tensor.numpy()


def _rebuild(path: str, parts: Sequence[Any], keys: Sequence[Any], names: Sequence[str]) -> Any:
    """Make an instance of a class that this process has imported, without calling its `__init__`."""
    found = _look_up(path)
    kind: Any = found if isinstance(found, type) else object
    if issubclass(kind, Enum):
        return kind.__members__[parts[0]]
    if issubclass(kind, numpy.generic):
        return kind(parts[0])
    if issubclass(kind, tuple):
        return tuple.__new__(kind, parts)
    if issubclass(kind, list | dict | UserDict):
        made = kind.__new__(kind)
    elif is_dataclass(kind) or hasattr(kind, "__attrs_attrs__"):
        made = object.__new__(kind)
    else:
        raise ValueError(
            f"`{path}` in a value of another rank is no class of containers or data here. Import it on every rank, and"
            " run the same code."
        )
    if isinstance(made, UserDict):
        made.__dict__["data"] = {}
    for name, value in zip(names, parts[len(keys) :], strict=True) if names else ():
        object.__setattr__(made, name, value)  # a dataclass may be frozen
    for key, item in zip(keys, parts, strict=False):
        made[key] = item
    if isinstance(made, list):
        made[:] = parts
    return made


def _look_up(path: str) -> Any:
    """Find a class in the modules that are imported already; importing a module would run its code."""
    module, _, names = path.partition(":")
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        found = getattr(found, "__dict__", {}).get(name)  # `getattr` alone would let a lazy package import modules
    return found

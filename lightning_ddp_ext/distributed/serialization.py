"""Sending nested values to other ranks as text and tensors, which are read without running any code.

Pickle would do the same for every object, but whoever reaches the port of a rank could then make it run whatever he
likes.
"""

import base64
import dataclasses
import math
import sys
from collections import UserDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.batches.containers import extra_names, fields, is_object, is_record
from lightning_ddp_ext.distributed.exchange import broadcast_object, exchange_device

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

_NUMBERS = "biufc"  # kinds of arrays
_NOT_PLAIN = object()


class FormWriter:
    """Writes the form of a value.

    Attributes:
        tensors: The tensors, by the numbers that the form mentions.
        left_out: What cannot be described, by its place in the value; the place of the whole value is empty.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.left_out: dict[str, Any] = {}

    def write(self, value: Any, place: str = "") -> Any:
        """Return the form of a value.

        Args:
            value: The value.
            place: Where it is in a larger one.
        """
        plain = self._write_plain(value)
        if plain is not _NOT_PLAIN:
            return plain
        kind = _path(type(value))
        if isinstance(value, dict | UserDict) and kind is not None:
            items = [
                (self.write(key, f"{place}[{key!r}], the key"), self.write(item, f"{place}[{key!r}]"))
                for key, item in value.items()
            ]
            return ["mapping", kind, items, self._write_attributes(value, extra_names(value), place)]
        if is_record(value) and kind is not None:
            return ["record", kind, self._write_items(value, place)]
        if isinstance(value, list) and kind is not None:
            return ["list", kind, self._write_items(value, place)]
        if type(value) in (tuple, torch.Size):
            return ["tuple", self._write_items(value, place)]
        if type(value) in (set, frozenset):
            return [type(value).__name__, self._write_items(value, place)]
        if is_object(value) and kind is not None:
            return ["object", kind, self._write_attributes(value, fields(value), place)]
        self.left_out[place] = value
        return ["left out", place]

    def _write_items(self, items: Iterable[Any], place: str) -> list[Any]:
        return [self.write(item, f"{place}[{index}]") for index, item in enumerate(items)]

    def _write_attributes(self, value: Any, names: Iterable[str], place: str) -> dict[str, Any]:
        return {name: self.write(getattr(value, name), f"{place}.{name}") for name in names}

    def _write_plain(self, value: Any) -> Any:
        """Return the form of what has no parts; anything else is `_NOT_PLAIN`."""
        if isinstance(value, Enum):
            kind = _path(type(value))
            return _NOT_PLAIN if kind is None else ["enum", kind, value.name]
        if isinstance(value, numpy.generic):
            value = value.item()
        if value is None or isinstance(value, str | bool | int | float):
            return value
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, bytes):
            return ["bytes", base64.b64encode(value).decode()]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, numpy.ndarray):
            return self._write_tensor("array", _as_tensor(value))
        return self._write_tensor("tensor", value)

    def _write_tensor(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_nested or value.is_quantized or value.is_meta:
            return _NOT_PLAIN
        if value.layout != torch.strided:
            return _NOT_PLAIN
        self.tensors.append(value.detach().as_subclass(Tensor))
        return [name, len(self.tensors) - 1]


def _as_tensor(array: Any) -> Tensor | None:
    if array.dtype.kind not in _NUMBERS:
        return None
    try:
        return torch.from_numpy(array.copy())  # torch warns of arrays that cannot be written to
    except (TypeError, ValueError):  # more bytes than torch has, or in another order
        return None


def read_form(form: Any, tensors: list[Tensor], fill: Mapping[str, Any]) -> Any:
    """Return the value that a form describes.

    Args:
        form: What `FormWriter` has written.
        tensors: The tensors.
        fill: What to put where something was left out, by place; None where there is nothing.

    Raises:
        ValueError: If a class is not known in this process.
    """
    if not isinstance(form, list):
        return form

    def read(part: Any) -> Any:
        return read_form(part, tensors, fill)

    match form:
        case ["tensor", number]:
            return tensors[number]
        case ["array", number]:
            return tensors[number].numpy()
        case ["left out", place]:
            return fill.get(place)
        case ["tuple", items]:
            return tuple(map(read, items))
        case ["set", items]:
            return set(map(read, items))
        case ["frozenset", items]:
            return frozenset(map(read, items))
        case ["record", path, items]:
            return tuple.__new__(_find_class(path, tuple), map(read, items))
        case ["list", path, items]:
            return _make_list(_find_class(path, list), list(map(read, items)))
        case ["mapping", path, items, attributes]:
            kind = _find_class(path, dict, UserDict)
            return _make_mapping(kind, {read(key): read(item) for key, item in items}, _read_all(attributes, read))
        case ["object", path, attributes]:
            return _make_object(_find_class(path), _read_all(attributes, read))
    return _read_plain(form)


def _read_all(attributes: Mapping[str, Any], read: Any) -> dict[str, Any]:
    return {name: read(item) for name, item in attributes.items()}


def _read_plain(form: list[Any]) -> Any:
    match form:
        case ["enum", path, name]:
            return _find_class(path, Enum).__members__[name]
        case ["complex", real, imaginary]:
            return complex(real, imaginary)
        case ["bytes", text]:
            return base64.b64decode(text)
        case ["dtype", name]:
            return DTYPES[name]
        case ["device", name]:
            return torch.device(name)
    raise ValueError(f"a value of another rank holds {form[0]!r}, of no known kind. Run the same code everywhere.")


def _make_list(kind: Any, items: list[Any]) -> Any:
    if kind is list:
        return items
    made = kind.__new__(kind)
    made[:] = items
    return made


def _make_mapping(kind: Any, items: dict[Any, Any], attributes: Mapping[str, Any]) -> Any:
    if kind is dict:
        return items
    made = kind.__new__(kind)
    if issubclass(kind, UserDict):
        made.__dict__["data"] = {}
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    for key, item in items.items():
        made[key] = item
    return made


def _make_object(kind: Any, attributes: Mapping[str, Any]) -> Any:
    if not dataclasses.is_dataclass(kind) and not hasattr(kind, "__attrs_attrs__"):
        raise ValueError(f"`{kind.__qualname__}` of another rank is no dataclass here. Run the same code everywhere.")
    made = object.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)  # also of frozen ones
    return made


def _path(kind: type) -> str | None:
    """Return where a class can be found again; None for one that is nowhere, such as one inside of a function."""
    path = f"{kind.__module__}:{kind.__qualname__}"
    return path if _look_up(path) is kind else None


def _look_up(path: str) -> Any:
    """Return what a path leads to; only in modules that are there already, since importing one would run its code."""
    module, _, names = path.partition(":")
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        # Not `getattr`: some packages import what they are asked for.
        found = getattr(found, "__dict__", {}).get(name)
    return found


def _find_class(path: str, *bases: type) -> Any:
    found = _look_up(path)
    if not isinstance(found, type) or (bases and not issubclass(found, bases)):
        raise ValueError(f"the class `{path}` of a value of another rank is not known here. Import it on every rank.")
    return found


@dataclass(frozen=True, slots=True)
class Packed:
    """A value in parts.

    Attributes:
        form: What JSON can hold: everything but the tensors.
        tensors: The tensors, by the numbers that the form mentions.
        left_out: What cannot be described, by its place in the value; the place of the whole value is empty. On the
            rank that has packed the value the objects themselves, on others the names of their classes.
    """

    form: Any
    tensors: list[Tensor]
    left_out: dict[str, Any]

    def name_left_out(self) -> str:
        """Name the first thing that is left out and its place, and say how many more there are."""
        place, value = next(iter(self.left_out.items()))
        kind = value if isinstance(value, str) else type(value).__name__
        more = f" and {len(self.left_out) - 1} more" if len(self.left_out) > 1 else ""
        return f"`{kind}`{f' at `{place}`' if place else ''}{more}"


def pack(value: Any) -> Packed:
    """Describe a value by text and tensors.

    Described are numbers, text, bytes, dense tensors, arrays of numbers, dtypes and devices; lists, tuples, sets and
    dictionaries, named tuples, dataclasses, attrs classes, enumerations, and classes derived from `list`, `dict` or
    `UserDict`. Anything else is left out.

    Args:
        value: The value.

    Returns:
        Its parts. The tensors are those of the value, not copies.
    """
    writer = FormWriter()
    return Packed(writer.write(value), writer.tensors, writer.left_out)


def unpack(packed: Packed, fill: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Put the parts together again.

    Args:
        packed: The parts.
        fill: What to put where something was left out, by place; None where there is nothing.

    Raises:
        ValueError: If a class is not known in this process.
    """
    return read_form(packed.form, packed.tensors, fill)


def broadcast_packed(packed: Packed | None, group: dist.ProcessGroup | None, source: int) -> Packed:
    """Return what one rank has packed, with tensors on the CPU; on every rank of the group. Three collectives.

    Args:
        packed: The value of that rank; what others give does not count.
        group: The ranks.
        source: Position in the group of the rank whose value counts.
    """
    if dist.get_rank(group) != source:
        packed = None
    header = broadcast_object(None if packed is None else header_of(packed), group, source)
    size = _size_of_tensors(header)
    flat = torch.empty(size, dtype=torch.uint8) if packed is None else _join(packed.tensors)
    flat = flat.to(exchange_device(group))
    if size:
        dist.broadcast(flat, group=group, group_src=source)
    if packed is not None:
        return packed
    return Packed(header["form"], _split(flat.cpu(), header["tensors"]), header["left_out"])


def send_tensors(packed: Packed, group: dist.ProcessGroup, ranks: Iterable[int]) -> None:
    """Send the tensors of a value to some ranks, which have its header and call `receive_tensors`.

    Args:
        packed: The value.
        group: A group with a backend for CPU tensors.
        ranks: Positions in the group of the ranks that receive them.
    """
    flat = _join(packed.tensors)
    for rank in ranks if flat.numel() else ():
        dist.send(flat, group=group, group_dst=rank)


def receive_tensors(header: dict[str, Any], group: dist.ProcessGroup, source: int) -> Packed:
    """Return a value of which the tensors come by `send_tensors`.

    Args:
        header: What `header_of` returned on the rank that sends it.
        group: The same group.
        source: Position in the group of the rank that sends.
    """
    flat = torch.empty(_size_of_tensors(header), dtype=torch.uint8)
    if flat.numel():
        dist.recv(flat, group=group, group_src=source)
    return Packed(header["form"], _split(flat, header["tensors"]), header["left_out"])


def header_of(packed: Packed) -> dict[str, Any]:
    """Return everything but the tensors, as JSON can hold it."""
    return {
        "form": packed.form,
        "tensors": [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in packed.tensors],
        "left_out": {place: type(value).__name__ for place, value in packed.left_out.items()},
    }


def _size_of_tensors(header: dict[str, Any]) -> int:
    return sum(_size(*entry) for entry in header["tensors"])


def _size(dtype: str, shape: list[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def _join(tensors: list[Tensor]) -> Tensor:
    dense = [tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(tensor.view(-1).view(torch.uint8) for tensor in dense)])


def _split(flat: Tensor, entries: list[tuple[str, list[int]]]) -> list[Tensor]:
    if not entries:
        return []
    parts = torch.split(flat, [_size(*entry) for entry in entries])
    # Copies, as a part may begin at an address that its type does not allow.
    return [part.clone().view(DTYPES[dtype]).view(shape) for part, (dtype, shape) in zip(parts, entries, strict=True)]

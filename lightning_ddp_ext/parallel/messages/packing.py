"""Sending nested values to other ranks as text and tensors, which are read without running any code.

Pickle would do the same for every object, but whoever reaches the port of a rank could then make it run whatever he
likes.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.parallel.messages.exchange import broadcast_object, exchange_device
from lightning_ddp_ext.parallel.messages.value_forms import DTYPES, FormWriter, read_form


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
        group: A group with a back-end for CPU tensors.
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

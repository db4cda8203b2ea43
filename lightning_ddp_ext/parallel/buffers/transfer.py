"""How buffers get from one rank to the others."""

import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext._compat.torch import flatten
from lightning_ddp_ext.parallel.messages.flat_messages import overwrite

_LOW = 2**32 - 1
_PIECE = 2**20  # elements of a large tensor that are under way at once


def is_mean(dtype: torch.dtype) -> bool:
    """Tell whether ranks make a mean of buffers of this type; others come from one of them."""
    return dtype.is_floating_point or dtype.is_complex


class BufferTransfer:
    """Buffers added up over ranks, under way: one message for each device, whatever their types.

    They travel as double-precision numbers. So a value that all ranks have stays what it is, to the last bit in types
    of up to 32 bits: its sum, divided by the total weight, is rounded to it. Whole numbers, of up to 64 bits, take two.

    Args:
        tensors: The buffers of this rank, alike on every rank.
        weight: What this rank counts in means.
        is_source: Whether this rank is the one from which other values come.
        group: The ranks.
    """

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor], weight: float, is_source: bool, group: dist.ProcessGroup) -> None:
        self._tensors = tensors
        self._members: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for member, tensor in enumerate(tensors):
            if tensor.numel():
                self._members.setdefault((tensor.device, tensor.dtype), []).append(member)
        encoded: dict[torch.device, list[Tensor]] = {}
        for (device, dtype), members in self._members.items():
            values = _encode(flatten([tensors[member] for member in members]))
            factor = weight if is_mean(dtype) else float(is_source)
            # A rank that does not count may hold anything, and 0 * nan is nan.
            encoded.setdefault(device, []).append(values * factor if factor else torch.zeros_like(values))
        self._flats = {device: torch.cat(parts) for device, parts in encoded.items()}
        self._works: list[Any] = [dist.all_reduce(flat, group=group, async_op=True) for flat in self._flats.values()]

    def wait_for_buffers(self) -> None:
        """Wait until all ranks have added theirs."""
        for work in self._works:
            work.wait()

    @torch.no_grad()
    def write(self, wanted: Container[int], total: float) -> None:
        """Give buffers the values of all ranks.

        Args:
            wanted: Positions of these buffers among those that were sent.
            total: Sum of the weights.
        """
        self.wait_for_buffers()
        rest = dict(self._flats)
        for (device, dtype), members in self._members.items():
            tensors = [self._tensors[member] for member in members]
            size = sum(map(torch.numel, tensors)) * (1 if dtype.is_floating_point else 2)
            encoded, rest[device] = rest[device][:size], rest[device][size:]
            values = _decode(encoded / total if is_mean(dtype) else encoded, dtype)
            overwrite(tensors, values, [member in wanted for member in members])


def cut(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a large tensor along its first dimension into views, to be sent one after another: less memory at once."""
    rows = max(1, _PIECE // max(1, math.prod(tensor.shape[1:])))
    return iter(torch.split(tensor, rows))


def _encode(values: Tensor) -> Tensor:
    """Write values in a row as double-precision numbers: complex ones and whole ones as two each."""
    if values.is_complex():
        return torch.view_as_real(values).reshape(-1).double()
    if values.is_floating_point():
        return values.double()
    whole = values.long()
    return torch.cat([whole >> 32, whole & _LOW]).double()


def _decode(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(encoded.view(-1, 2)).to(dtype)
    if dtype.is_floating_point:
        return encoded.to(dtype)
    high, low = encoded.long().chunk(2)
    return ((high << 32) | low).to(dtype)

"""Numbers that ranks send each other in every synchronisation, and the message that carries them."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.errors import RanksOutOfStepError

_BITS = 64  # of a number
Check = Callable[[Sequence[float]], None]


class ControlField:
    """A number that each rank sends with control messages, exact up to 53 bits.

    Attributes:
        value: The number of this rank, which stays until it is set again.
        of_ranks: The numbers of all ranks in the last message with the field, the same on every rank; at first empty.
    """

    def __init__(self, check: Check | None = None, in_every_message: bool = False) -> None:
        self.value = 0.0
        self.of_ranks: Sequence[float] = ()
        self.check = check
        self.in_every_message = in_every_message


class Control:
    """The fields of the control message. Each belongs to the code that has added it.

    Every rank has a range of the message to itself, so that a sum over ranks holds the numbers of all. In types of
    fewer than 64 bits, a number is sent in parts, as whole numbers that the type represents exactly.

    Attributes:
        weights: Weight of each rank in the last synchronisation; empty before the first.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.weights: Sequence[float] = ()
        self._group: Any = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._fields: list[ControlField] = []
        self.count = self.add(self._check_count)  # of synchronisations

    def add(self, check: Check | None = None, in_every_message: bool = False) -> ControlField:
        """Add a field to all later messages. Call on every rank at the same point.

        `check` gets the numbers of all ranks from each message, on every rank, and raises an error if they do not fit.
        Messages without a synchronisation, see `exchange`, have only the fields that are `in_every_message`.
        """
        self._fields.append(ControlField(check, in_every_message))
        return self._fields[-1]

    @property
    def total_weight(self) -> float:
        """Sum of the weights, added in the same order on every rank."""
        return sum(self.weights)

    @property
    def source(self) -> int:
        """The first rank with a weight above 0."""
        return next(rank for rank, weight in enumerate(self.weights) if weight > 0)

    def length(self, marks: int, dtype: torch.dtype) -> int:
        """Return the number of elements of a message in a type, with so many marks."""
        return len(self._fields) * (1 if dtype == torch.float64 else len(_parts(dtype)[0])) * self._ranks + marks

    @staticmethod
    def fits(dtype: torch.dtype) -> bool:
        """Return True if a type of numbers represents a message exactly."""
        return dtype.is_floating_point and torch.finfo(dtype).eps <= 2**-7  # bfloat16 and larger types

    def write(self, marks: bytearray, dtype: torch.dtype) -> Tensor:
        """Return the message of this rank, on the CPU: its fields, and marks that are added up over ranks."""
        own: Any = numpy.array([field.value for field in self._fields], numpy.float64)
        if dtype != torch.float64:
            shifts, mask = _parts(dtype)
            own = ((own.view(numpy.int64)[:, None] >> shifts) & mask).ravel()
        message = numpy.zeros(self.length(len(marks), dtype), own.dtype)
        message[self._rank * own.size : (self._rank + 1) * own.size] = own
        if marks:
            message[-len(marks) :] = numpy.frombuffer(marks, numpy.uint8)
        return torch.from_numpy(message).to(dtype)

    def read(self, sums: Tensor) -> list[float]:
        """Read the sum of all messages, a CPU tensor, and check the fields; return the sums of the marks."""
        number = self.length(0, sums.dtype)
        sent: Any = sums[:number]
        if sent.dtype != torch.float64:
            shifts, _ = _parts(sent.dtype)
            sent = (sent.long().numpy().reshape(-1, len(shifts)) << shifts).sum(1).view(numpy.float64)
        self._receive(self._fields, sent.reshape(self._ranks, -1).tolist())
        return sums[number:].tolist()

    def exchange(self) -> None:
        """Send some fields without a synchronisation. Call on every rank."""
        fields = [field for field in self._fields if field.in_every_message]
        own = torch.tensor([field.value for field in fields], dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self._ranks)]
        # No all-reduce: gloo would abort a process whose peer makes one of another size. So the ranks wait.
        dist.all_gather(rows, own, group=self._group)
        self._receive(fields, [row.tolist() for row in rows])

    def _receive(self, fields: Sequence[ControlField], of_ranks: Sequence[Sequence[float]]) -> None:
        for field, column in zip(fields, zip(*of_ranks, strict=True), strict=True):
            field.of_ranks = column
        for field in fields:
            if field.check is not None:
                field.check(field.of_ranks)

    def close(self) -> None:
        """Forget the group and the fields with their checks, so that no cycle of references keeps the group alive."""
        for field in self._fields:
            field.check = None
        self._fields.clear()
        self._group = None

    def _check_count(self, counts: Sequence[float]) -> None:
        own = counts[self._rank]
        if len(set(counts)) > 1:
            raise RanksOutOfStepError(
                f"rank {self._rank} makes its synchronisation {own:.0f} of gradients, others theirs of number"
                f" {list_others(counts, own)}. An error in a block of `synchronize` has to be raised on every rank, or"
                " end the run."
            )


@functools.cache
def _parts(dtype: torch.dtype) -> tuple[Any, int]:
    """Return the positions of the parts of a number, and a mask with as many bits as a part: all that are exact."""
    bits = 1 - int(math.log2(torch.finfo(dtype).eps))
    return numpy.arange(0, _BITS, bits), 2**bits - 1


def list_others(numbers: Sequence[float], own: float, describe: Callable[[int], str] = str) -> str:
    """Return the different numbers of other ranks in words."""
    return ", ".join(map(describe, sorted({int(number) for number in numbers} - {int(own)})))

"""What ranks tell each other at the end of a synchronisation: one small message, or a part of a larger one."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.errors import RanksOutOfStepError

NOTES = 2
_NUMBERS = 5 + NOTES  # of each rank
_BYTES = 8  # of a number


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank has found. The last three are equally long on every rank.

    Attributes:
        weight: What its gradient counts.
        stop: Above 0 if it asks to stop.
        begun: How many synchronisations it has begun.
        position: Where in the training it is.
        notes: What it tells the others, at most `NOTES` numbers.
        structure: A number for its buffers, of up to 53 bits.
        late: 1 for each bucket with late gradients.
        used: 1 for each parameter that has a gradient.
        changed: 1 for each buffer that has changed.
    """

    weight: float
    stop: int
    begun: int
    position: int
    notes: Sequence[float]
    structure: int
    late: bytearray
    used: bytearray
    changed: bytearray


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What all ranks together found; the same on every rank.

    Attributes:
        weights: Weight of each rank.
        notes: What each rank tells the others.
        stop: The largest number with which a rank asks to stop, 0 if none does.
        late: For each bucket, above 0 if on any rank gradients came after it had left.
        used: For each parameter, above 0 if it has a gradient on any rank.
        changed: For each buffer, above 0 if it has changed on any rank.
        structures: The number for its buffers that each rank gives.
    """

    weights: Sequence[float]
    notes: Sequence[Sequence[float]]
    stop: float
    late: Sequence[float]
    used: Sequence[float]
    changed: Sequence[float]
    structures: Sequence[float]

    @property
    def total_weight(self) -> float:
        """Sum of the weights, added in the same order on every rank."""
        return sum(self.weights)

    @property
    def source(self) -> int:
        """The first rank that had data."""
        return next(rank for rank, weight in enumerate(self.weights) if weight > 0)


class SyncControl:
    """Writes reports as tensors that are added up over the ranks, and reads the sums.

    Numbers have places of each rank's own. Where the tensor has fewer bits, they travel as their bytes, which are whole
    numbers up to 255: a type that holds these exactly, such as bfloat16, can take them along.

    Args:
        group: The ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)

    def length(self, flags: int, dtype: torch.dtype) -> int:
        """Return how many elements of a type a report has, with so many marks of late buckets and the like."""
        return _NUMBERS * (1 if dtype == torch.float64 else _BYTES) * self._world_size + flags

    @staticmethod
    def can_travel_as(dtype: torch.dtype) -> bool:
        """Tell whether a type of numbers holds a report exactly."""
        return dtype.is_floating_point and torch.finfo(dtype).eps <= 2**-7  # 8 bits

    def write(self, report: RankReport, dtype: torch.dtype) -> Tensor:
        """Return the report of this rank in a floating-point type, to be added to those of the others."""
        flags = report.late + report.used + report.changed
        notes = [*report.notes, *[0] * (NOTES - len(report.notes))]
        numbers = [report.weight, report.stop, report.begun, report.position, report.structure, *notes]
        own = torch.tensor(numbers, dtype=torch.float64)
        own = own if dtype == torch.float64 else own.view(torch.uint8)
        written = torch.zeros(self.length(len(flags), dtype), dtype=dtype)
        written[self._rank * own.numel() : (self._rank + 1) * own.numel()] = own
        if flags:
            written[-len(flags) :] = torch.frombuffer(flags, dtype=torch.uint8)
        return written

    def read(self, sums: Tensor, own: RankReport) -> SyncReport:
        """Read what the reports of all ranks add up to.

        Args:
            sums: The sum, on the CPU.
            own: The report of this rank.

        Raises:
            RanksOutOfStepError: If ranks are at different positions, or have begun different synchronisations.
        """
        of_ranks = self.length(0, sums.dtype)
        found = sums[:of_ranks]
        found = found if found.dtype == torch.float64 else found.to(torch.uint8).view(torch.float64)
        numbers = found.reshape(self._world_size, _NUMBERS).tolist()
        weights, stops, begun, positions, structures, *_ = zip(*numbers, strict=True)
        if len(set(begun)) > 1:
            raise RanksOutOfStepError(
                f"rank {self._rank} makes its synchronisation {own.begun} of gradients, others theirs of number"
                f" {_others(begun, own.begun)}. An error in a block of `synchronize` has to be raised on every rank, or"
                " end the run."
            )
        if len(set(positions)) > 1:
            raise RanksOutOfStepError(
                f"rank {self._rank} synchronises gradients at position {own.position}, others at"
                f" {_others(positions, own.position)}. Run equally many batches, and in each of them equally many"
                " synchronised backward passes, on every rank."
            )
        flags = iter(sums[of_ranks:].tolist())
        lates, uses, changes = (list(itertools.islice(flags, len(part))) for part in (own.late, own.used, own.changed))
        notes = [of_rank[-NOTES:] for of_rank in numbers]
        return SyncReport(weights, notes, max(stops), lates, uses, changes, structures)


def _others(numbers: Sequence[float], own: int) -> str:
    return ", ".join(map(str, sorted({int(number) for number in numbers} - {own})))

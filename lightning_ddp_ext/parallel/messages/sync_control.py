"""What ranks tell each other at the end of a synchronisation: one small message."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_ddp_ext.errors import RanksOutOfStepError


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What all ranks together found; the same on every rank.

    Attributes:
        weights: Weight of each rank.
        notes: What each rank tells the others.
        stop: The largest number with which a rank asks to stop, 0 if none does.
        late: For each bucket, number of ranks on which gradients came after it had left.
        used: For each parameter, number of ranks on which it has a gradient.
        changed: For each buffer, number of ranks on which it has changed.
        structures: The number for its buffers that each rank gives.
    """

    weights: Sequence[float]
    notes: Sequence[float]
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
    """Exchanges reports. The message is on the CPU: reading it never waits for a GPU.

    Args:
        group: The ranks, over a back-end that has CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)

    def exchange(
        self,
        weight: float,
        stop: int,
        position: int,
        note: int,
        structure: int,
        late: bytearray,
        used: bytearray,
        changed: bytearray,
    ) -> SyncReport:
        """Add up what all ranks report. The last three arguments are equally long on every rank.

        Args:
            weight: What this rank's gradient counts.
            stop: Above 0 if this rank asks to stop.
            position: Where in the training this rank is.
            note: What this rank tells the others.
            structure: A number for the buffers of this rank, of up to 53 bits.
            late: 1 for each bucket with late gradients on this rank.
            used: 1 for each parameter that has a gradient on this rank.
            changed: 1 for each buffer that has changed on this rank.

        Returns:
            The report of all ranks.

        Raises:
            RanksOutOfStepError: If ranks are at different positions.
        """
        bits = late + used + changed
        message = torch.zeros(5 * self._world_size + len(bits), dtype=torch.float64)
        own = torch.tensor([weight, stop, position, structure, note], dtype=torch.float64)
        message[5 * self._rank : 5 * self._rank + 5] = own
        if bits:
            message[5 * self._world_size :] = torch.frombuffer(bits, dtype=torch.uint8)
        dist.all_reduce(message, group=self._group)
        numbers = message.tolist()
        weights, stops, positions, structures, notes = (numbers[start : 5 * self._world_size : 5] for start in range(5))
        if len(set(positions)) > 1:
            others = sorted({int(other) for other in positions} - {position})
            raise RanksOutOfStepError(
                f"rank {self._rank} synchronises gradients at position {position}, others at"
                f" {', '.join(map(str, others))}. Run equally many batches, and in each of them equally many"
                " synchronised backward passes, on every rank."
            )
        sums = iter(numbers[5 * self._world_size :])
        lates, uses, changes = (list(itertools.islice(sums, len(part))) for part in (late, used, changed))
        return SyncReport(weights, notes, max(stops), lates, uses, changes, structures)

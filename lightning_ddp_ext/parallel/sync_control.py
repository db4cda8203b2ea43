"""What ranks tell each other at the end of a synchronisation: one small message."""

from collections.abc import Iterable, Sequence
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
        stop: Number of ranks that ask to stop.
        late: For each bucket, number of ranks on which gradients came after it had left.
        used: For each parameter, number of ranks on which it has a gradient.
        changed: For each buffer, number of ranks on which it has changed.
    """

    weights: Sequence[float]
    notes: Sequence[float]
    stop: float
    late: Sequence[float]
    used: Sequence[float]
    changed: Sequence[float]

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
        parameters: Number of parameters.
        buffers: Number of buffers.
        group: The ranks, over a back-end that has CPU tensors.
    """

    def __init__(self, parameters: int, buffers: int, group: dist.ProcessGroup) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)

    def exchange(
        self,
        weight: float,
        stop: bool,
        position: int,
        note: int,
        late: Iterable[int],
        used: bytearray,
        changed: Iterable[int],
        buckets: int,
    ) -> SyncReport:
        """Add up what all ranks report.

        Args:
            weight: What this rank's gradient counts.
            stop: Whether this rank asks to stop.
            position: Where in the training this rank is.
            note: What this rank tells the others.
            late: Buckets with late gradients on this rank.
            used: 1 for each parameter that has a gradient on this rank.
            changed: Buffers that have changed on this rank.
            buckets: Number of buckets.

        Returns:
            The report of all ranks.

        Raises:
            RanksOutOfStepError: If ranks are at different positions.
        """
        ends = [self._world_size, self._world_size, 1, 2, buckets, self._parameters, self._buffers]
        message = torch.zeros(sum(ends), dtype=torch.float64)
        weights, notes, stops, positions, lates, uses, changes = torch.split(message, ends)
        weights[self._rank], notes[self._rank] = weight, note
        stops[0] = stop
        positions[0], positions[1] = position, position**2
        lates[list(late)] = 1
        if used:
            uses.copy_(torch.frombuffer(used, dtype=torch.uint8))
        changes[list(changed)] = 1
        dist.all_reduce(message, group=self._group)
        total, squares = positions.tolist()
        if self._world_size * squares != total**2:  # the variance over ranks
            raise RanksOutOfStepError(
                f"rank {self._rank} synchronises gradients at position {position}, others at another one (their mean"
                f" is {total / self._world_size:g}). Run equally many batches, and in each of them equally many"
                " synchronised backward passes, on every rank."
            )
        return SyncReport(
            weights.tolist(), notes.tolist(), stops.item(), lates.tolist(), uses.tolist(), changes.tolist()
        )

"""How fast a process group adds up tensors, by their size."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

SIZES = tuple(1024 * 16**power for power in range(5))  # 1 KiB to 64 MiB

_REPEATS = 9
_ELEMENT = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class AllReduceTime:
    """How long an all-reduce took.

    The bandwidths are those of NCCL's own tests, so that numbers can be compared
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

    Attributes:
        size: Size of the tensor of each rank in bytes.
        seconds: The time of the slowest rank: its median over several calls.
        world_size: Number of ranks.
    """

    size: int
    seconds: float
    world_size: int

    @property
    def algorithm_bandwidth(self) -> float:
        """Size over time, in bytes per second: how soon a tensor of this size is done."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that each rank has to send at least, which does not depend on the number of ranks.

        An all-reduce among n ranks moves 2 (n - 1) / n of the tensor in and out of each.
        """
        return self.algorithm_bandwidth * 2 * (self.world_size - 1) / self.world_size


def measure_all_reduce(
    device: torch.device, *, sizes: Sequence[int] = SIZES, limit: float = 4.0, group: dist.ProcessGroup | None = None
) -> list[AllReduceTime]:
    """Time all-reduces of several sizes; every rank of the group has to call it.

    Each size is called once to warm up, then several times. Sizes for which too little time is left are left out, the
    same on every rank.

    Args:
        device: Where the tensors are.
        sizes: Sizes of the tensors in bytes, ascending.
        limit: Seconds for all of it, about; the first size is measured however long it takes.
        group: The ranks; None for all.

    Returns:
        One entry for each size that was measured, the same on every rank; none if the group has one rank.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return []
    measured: list[AllReduceTime] = []
    repeats, started = _REPEATS, time.perf_counter()
    for at, size in enumerate(sizes):
        tensor = torch.zeros(size // _ELEMENT, device=device)
        _, *times = [_time_call(tensor, group) for _ in range(1 + repeats)]
        # The slowest rank decides for all, so that they stop after the same size.
        agreed = torch.tensor([statistics.median(times), time.perf_counter() - started], device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
        seconds, spent = agreed.tolist()
        measured.append(AllReduceTime(size, seconds, world_size))
        expected = seconds * sizes[min(at + 1, len(sizes) - 1)] / size
        repeats = min(_REPEATS, int((limit - spent) / expected) - 1)
        if repeats < 1:
            break
    return measured


def _time_call(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    started = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)  # the call has only queued it
    return time.perf_counter() - started

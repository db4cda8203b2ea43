"""Ranks as threads of one process, with a process group that exchanges tensors in memory."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass
class FakeGroup:
    """The process group of one rank; every collective waits for all ranks."""

    rank: int
    barrier: threading.Barrier
    sent: dict[int, Tensor]

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        self.sent[self.rank] = tensor.clone()
        self.barrier.wait(timeout=30)
        received = [self.sent[rank].clone() for rank in range(self.barrier.parties)]
        self.barrier.wait(timeout=30)
        return received


def _all_gather(outputs: list[Tensor], tensor: Tensor, group: FakeGroup) -> None:
    for output, received in zip(outputs, group.exchange(tensor), strict=True):
        output.copy_(received)


def _gather(tensor: Tensor, outputs: list[Tensor] | None, group: FakeGroup, group_dst: int) -> None:
    received = group.exchange(tensor)
    if group.rank == group_dst:
        for output, part in zip(outputs, received, strict=True):
            output.copy_(part)


def _all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    parts = torch.stack(group.exchange(tensor))
    tensor.copy_(parts.amax(0) if op == dist.ReduceOp.MAX else parts.sum(0))
    return mock.Mock() if async_op else None


def _broadcast(tensor: Tensor, group: FakeGroup, group_src: int) -> None:
    tensor.copy_(group.exchange(tensor)[group_src])


def run_ranks(world_size: int, function: Callable[[Any], T]) -> list[T]:
    """Call a function on each rank with the group of the rank; returns the results, or raises the first error."""
    barrier, sent = threading.Barrier(world_size), {}

    def run(rank: int) -> T:
        try:
            return function(FakeGroup(rank, barrier, sent))
        except BaseException:
            barrier.abort()
            raise

    fakes = {
        "get_rank": lambda group=None: getattr(group, "rank", 0),
        "get_world_size": lambda group: group.barrier.parties,
        "get_process_group_ranks": lambda group: list(range(group.barrier.parties)),
        "get_backend_config": lambda group: "cpu:gloo",
        "all_gather": _all_gather,
        "all_reduce": _all_reduce,
        "gather": _gather,
        "broadcast": _broadcast,
    }
    with mock.patch.multiple(dist, **fakes), ThreadPoolExecutor(world_size) as pool:
        runs = [pool.submit(run, rank) for rank in range(world_size)]
    # The error of one rank breaks the barrier of the others.
    errors = [run.exception() for run in runs]
    for error in sorted(filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [run.result() for run in runs]

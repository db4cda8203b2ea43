"""Exchanging small things between the ranks of a process group."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from lightning_ddp_ext.parallel.connections import tracked_connections

T = TypeVar("T")


def own_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Make a group of all ranks that has CPU tensors too, for what ranks tell each other."""
    backends = dist.get_backend_config()
    backend = None if "cpu" in backends else f"cpu:gloo,{backends}"
    with tracked_connections():
        group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend=backend)
    return group


def group_with_cpu(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group that has CPU tensors.

    Raises:
        ValueError: If it has none.
    """
    backends = dist.get_backend_config(group)
    if "cpu" not in backends:
        raise ValueError(f'`process_group` has no back-end for CPU tensors, got "{backends}". Add "cpu:gloo".')
    return group


def exchange_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device whose tensors the group can send: the CPU if it can, else the current one of its devices."""
    kinds = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def gather_integer(value: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the number that each rank gives, of 64 bits with a sign, in the order of ranks. One collective."""
    return [numbers[0] for numbers in gather_integers([value], group)]


def gather_integers(values: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Return the numbers that each rank gives, equally many on all, as `gather_integer` does for one."""
    own = torch.tensor(values, dtype=torch.int64, device=exchange_device(group))
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return cast(list[list[int]], torch.stack(gathered).tolist())


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the object that each rank gives, pickled on the way, in the order of ranks."""
    gathered: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return cast(list[T], gathered)


def list_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """Return ranks in words, such as `"rank 1"` or `"ranks 0, 2"`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

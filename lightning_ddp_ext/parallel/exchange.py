"""Exchanging small things between the ranks of a process group."""

from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")


def group_with_cpu(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Make a group of all ranks that has CPU tensors too, for what ranks tell each other."""
    backends = dist.get_backend_config()
    backend = None if "cpu" in backends else f"cpu:gloo,{backends}"
    group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend=backend)
    return group


def exchange_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device whose tensors the group can send: the CPU if it can, else the current one of its devices."""
    kinds = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def gather_integer(value: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the number that each rank gives, of 64 bits with a sign, in the order of ranks. One collective."""
    own = torch.tensor([value], dtype=torch.int64, device=exchange_device(group))
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return cast(list[int], torch.cat(gathered).tolist())


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the object that each rank gives, pickled on the way, in the order of ranks."""
    gathered: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return cast(list[T], gathered)


def list_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """Return ranks in words, such as `"rank 1"` or `"ranks 0, 2"`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

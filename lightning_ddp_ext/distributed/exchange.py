"""Exchanging small things between the ranks of a process group."""

import hashlib
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from lightning_ddp_ext.distributed.connections import tracked_connections


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
        raise ValueError(f'`process_group` has no backend for CPU tensors, got "{backends}". Add "cpu:gloo".')
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


def gather_objects(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value that each rank gives, in the order of ranks. Two collectives.

    It travels as JSON, which runs no code when it is read: tuples arrive as lists, and keys as strings. Where
    collectives are redirected to ranks that have data, see `ActiveRankCollectives`, others give None.
    """
    own = _to_bytes(value, exchange_device(group))
    lengths = gather_integer(own.numel(), group)
    padded = own.new_zeros(max(lengths))
    padded[: own.numel()] = own
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return [_from_bytes(row[:length]) if length else None for row, length in zip(gathered, lengths, strict=True)]


def gather_different(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value that each rank gives as `gather_objects` does, or the only one if all give the same.

    While all are the same, it costs one collective of 8 bytes per rank.
    """
    own = int.from_bytes(bytes.fromhex(digest(value)), "little", signed=True)
    return [value] if len(set(gather_integer(own, group))) == 1 else gather_objects(value, group)


def digest(value: object) -> str:
    """Return 16 characters for a value of numbers, text, lists and dictionaries, in which the order of keys counts."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def broadcast_object(value: object, group: dist.ProcessGroup | None, source: int) -> Any:
    """Return the value that one rank gives, as `gather_objects` does for all.

    Args:
        value: The value; what other ranks give does not count.
        group: The ranks.
        source: Position in the group of the rank whose value counts.
    """
    device = exchange_device(group)
    is_source = dist.get_rank(group) == source
    own = _to_bytes(value, device) if is_source else torch.empty(0, dtype=torch.uint8, device=device)
    length = torch.tensor(own.numel(), dtype=torch.int64, device=device)
    dist.broadcast(length, group=group, group_src=source)
    sent = own if is_source else own.new_empty(int(length))
    dist.broadcast(sent, group=group, group_src=source)
    return _from_bytes(sent)


def _to_bytes(value: object, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _from_bytes(text: torch.Tensor) -> Any:
    return json.loads(text.cpu().numpy().tobytes())


def list_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """Return ranks in words, such as `"rank 1"` or `"ranks 0, 2"`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

"""Small objects sent between ranks by collectives."""

import functools
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_ddp_ext.distributed.backends import tracked_connections
from lightning_ddp_ext.distributed.serialization import name_skipped, pack, unpack
from lightning_ddp_ext.errors import OtherRankError


def own_group(timeout: timedelta | None = None, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Make a group of some ranks, by default of all, that can send CPU tensors. Call on every rank."""
    _prepare_forks()
    backends = dist.get_backend_config()
    backend = None if "cpu" in backends else f"cpu:gloo,{backends}"
    with tracked_connections():
        group: dist.ProcessGroup = dist.new_group(ranks, timeout, backend)
    return group


@functools.cache
def _prepare_forks() -> None:
    """Keep forks of this process, such as the workers of loaders, from waiting for threads, which a fork lacks."""
    if not hasattr(os, "register_at_fork"):  # Windows
        return
    # An error may have left a group in a cycle, and the destructor of gloo's groups waits for threads.
    os.register_at_fork(after_in_child=gc.freeze)
    # There, a fork may wait for ever if a thread of gloo releases a tensor meanwhile (CPython issue 112275).
    if sys.version_info < (3, 10, 15) or (3, 11) <= sys.version_info < (3, 11, 10):
        # So release Python's lock for as long as threads of gloo usually need it after a collective.
        os.register_at_fork(before=functools.partial(time.sleep, 0.02))


def destroy_group(group: dist.ProcessGroup | None = None) -> None:
    """Destroy a process group, or all for None."""
    if torch.__version__ < "2.8":
        # There, a group joins its threads without releasing Python's lock, which a thread of gloo waits for if it has
        # just released the tensor of a collective. On a busy machine the thread may start late.
        time.sleep(0.1)
    dist.destroy_process_group(group)


def group_with_cpu(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group if it can send CPU tensors, and raise `ValueError` otherwise."""
    backends = dist.get_backend_config(group)
    if "cpu" not in backends:
        raise ValueError(f'`process_group` has no backend for CPU tensors, got "{backends}". Add "cpu:gloo".')
    return group


def exchange_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device whose tensors the group can send: the CPU if possible."""
    kinds = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def gather_integer(value: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the 64-bit integer of each rank; one collective."""
    return [numbers[0] for numbers in gather_integers([value], group)]


def gather_integers(values: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Return the 64-bit integers of each rank, the same number on all; one collective."""
    own = torch.tensor(values, dtype=torch.int64, device=exchange_device(group))
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return cast(list[list[int]], torch.stack(gathered).tolist())


def gather_known(values: Sequence[int | None], group: dist.ProcessGroup | None = None) -> list[list[int] | None]:
    """Return the numbers of all ranks for each of the values, or None if any rank does not know its number.

    Numbers are at least 0, and as many on all ranks; one collective.
    """
    unknown = -1
    rows = gather_integers([unknown if value is None else value for value in values], group)
    return [None if unknown in column else [*column] for column in zip(*rows, strict=True)]


def gather_objects(value: object, group: dist.ProcessGroup | None = None, target: int | None = None) -> list[Any]:
    """Return the object of each rank, or None for a rank without data in the uneven phase; two collectives.

    With a `target`, a position in the group, only that rank gets the objects, and the others an empty list.
    """
    rows = gather_bytes(to_bytes(value), group, target)
    return [unpack(row)[0] if len(row) else None for row in rows]


def gather_bytes(data: Tensor, group: dist.ProcessGroup | None = None, target: int | None = None) -> list[Tensor]:
    """Return the bytes of each rank on the CPU, as `gather_objects` returns objects; two collectives."""
    # Each row begins with its length, so that with a target other ranks do the same work however many there are.
    length = torch.tensor([len(data)], dtype=torch.int64)
    longest = length.to(exchange_device(group), copy=True)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group)
    row = torch.cat([length.view(torch.uint8), functional.pad(data, (0, int(longest) - len(data)))]).to(longest.device)
    is_target = target in (None, dist.get_rank(group))
    gathered = [torch.empty_like(row) for _ in range(dist.get_world_size(group))] if is_target else []
    if target is None:
        dist.all_gather(gathered, row, group=group)
    else:
        dist.gather(row, gathered or None, group=group, group_dst=target)
    return [row[8:][: int(row[:8].view(torch.int64))] for row in (row.cpu() for row in gathered)]


def gather_different(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the JSON-serialisable object of each rank, or a single one if all are equal, for 8 bytes per rank."""
    own = int.from_bytes(bytes.fromhex(digest(value)), "little", signed=True)
    # Ranks are nearly always equal, which a number shows; all have the same numbers, so that all send objects or none.
    return [value] if len(set(gather_integer(own, group))) == 1 else gather_objects(value, group)


def digest(value: object) -> str:
    """Return 16 hexadecimal characters for a JSON-serialisable object; the order of dictionary keys matters."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def broadcast_object(value: object, group: dist.ProcessGroup | None, source: int) -> Any:
    """Return the object of the rank at position `source` of the group; two collectives."""
    return unpack(broadcast_bytes(to_bytes(value) if dist.get_rank(group) == source else None, group, source))[0]


def broadcast_bytes(data: Tensor | None, group: dist.ProcessGroup | None, source: int) -> Tensor:
    """Return the bytes of the rank at position `source` of the group; other ranks pass None. Two collectives."""
    device = exchange_device(group)
    # First the length, because the other ranks have to make a tensor of this size.
    length = torch.tensor(0 if data is None else data.numel(), dtype=torch.int64, device=device)
    dist.broadcast(length, group=group, group_src=source)
    sent = torch.empty(int(length), dtype=torch.uint8, device=device) if data is None else data.to(device)
    dist.broadcast(sent, group=group, group_src=source)
    return sent


def scatter_objects(
    objects: Sequence[Any] | None = None, source: int = 0, group: dist.ProcessGroup | None = None
) -> Any:
    """Give each rank one of the objects of rank `source`; returns the object of this rank.

    Objects may be plain values, tensors, arrays of numbers, dataclasses and containers of these, of different sizes.
    They are not pickled. Received tensors are on the CPU. Three collectives: all ranks of the group call this function.
    In the uneven phase of `ddp_join`, ranks without data do not, and their objects are not sent.

    Args:
        objects: One object for each rank of the group; None on the other ranks than the source.
        source: Position in the group of the rank that has the objects.
        group: A process group; None for all ranks. Without `torch.distributed`, there is one rank.

    Returns:
        The object at the position of this rank in the group.

    Raises:
        ValueError: On the source: if `objects` is not a sequence with one object for each rank. On all ranks: if there
            is no rank `source`.
        TypeError: On the source: if an object cannot be sent.
        OtherRankError: On the other ranks, in these cases.

    Examples:
        >>> scatter_objects(["all of the work"])
        'all of the work'
    """
    is_single = not dist.is_initialized()
    rank, world_size = (0, 1) if is_single else (dist.get_rank(group), dist.get_world_size(group))
    if source not in range(world_size):
        raise ValueError(f"`source` must be a rank of the group, from 0 to {world_size - 1}, got {source}.")
    error: Exception | None = None
    packed: list[Tensor] = []
    if rank == source:
        try:
            packed = [to_bytes(value) for value in _one_per_rank(objects, world_size)]
        except (ValueError, TypeError) as failure:
            error = failure
    if is_single:
        if error is not None:
            raise error
        return unpack(packed[0])[0]
    # Before the objects, so that an error of the source is raised on every rank instead of leaving the others to wait.
    lengths = broadcast_object(str(error) if error else [len(data) for data in packed], group, source)
    if error is not None:
        raise error
    if isinstance(lengths, str):
        raise OtherRankError(f"rank {source} of the group scatters no objects: {lengths}")
    device = exchange_device(group)
    received = torch.empty(max(lengths), dtype=torch.uint8, device=device)
    parts = [functional.pad(data, (0, max(lengths) - len(data))).to(device) for data in packed]
    dist.scatter(received, parts or None, group=group, group_src=source)
    return unpack(received[: lengths[rank]])[0]


def _one_per_rank(objects: Sequence[Any] | None, world_size: int) -> Sequence[Any]:
    if not isinstance(objects, Sequence) or len(objects) != world_size:
        got = f"{len(objects)}" if isinstance(objects, Sequence) else f"a {type(objects).__name__}"
        raise ValueError(
            f"`objects` must be a sequence of {world_size} objects, one for each rank, got {got}. Put what belongs to"
            " one rank into one list."
        )
    return objects


def to_bytes(value: object) -> Tensor:
    """Serialise an object, or raise `TypeError` if it cannot be sent."""
    packed = pack(value)
    if packed.skipped:
        raise TypeError(f"{name_skipped(packed.skipped)} cannot be sent to another rank. Send plain values or tensors.")
    return packed.data


def list_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as `"rank 1"` or `"ranks 0, 2"`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

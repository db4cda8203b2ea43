"""Many small tensors as few large ones."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext._compat.torch import copy_all_, flatten, views_of

_BUCKET_BYTES = 25 * 2**20  # what torch's own DistributedDataParallel uses


def send_all(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Send tensors to a device in flat buckets: one transfer per bucket instead of one per tensor.

    Args:
        tensors: Tensors on one device, of any shape, type and layout.
        device: Where they are needed.

    Returns:
        Tensors of the same values on the device, in the same order: the ones given if they are there already,
        otherwise, if they are dense, views of the buckets.
    """
    if not tensors or tensors[0].device == device:
        return list(tensors)
    dense = _dense(tensors)
    in_buckets = set(dense)
    sent = [tensor if number in in_buckets else tensor.to(device) for number, tensor in enumerate(tensors)]
    for bucket in divide_into_buckets(tensors, dense):
        members = [tensors[position] for position in bucket]
        flat = torch.cat([member.reshape(-1) for member in members]).to(device, non_blocking=True)
        parts = torch.split(flat, [member.numel() for member in members])
        for position, member, part in zip(bucket, members, parts, strict=True):
            sent[position] = part.view(member.shape)
    return sent


@torch.no_grad()
def broadcast_all(tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Give tensors the values that they have on one rank, in flat buckets: few messages instead of many.

    Args:
        tensors: Dense tensors of any shape and type, alike on every rank; others are left as they are.
        group: The ranks.
        source: The rank that has the values.
    """
    for bucket in divide_into_buckets(tensors, _dense(tensors)):
        members = [tensors[position] for position in bucket]
        flat = flatten(members)
        # As bytes: not every backend has every type.
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=source)
        overwrite(members, flat, [True] * len(members))


@torch.no_grad()
def overwrite(targets: Sequence[Tensor], flat: Tensor, wanted: Sequence[bool]) -> None:
    """Write values into tensors in few kernel launches; where elements share memory, as after `expand`, once.

    Args:
        targets: Tensors of one type and device, none of them empty.
        flat: The elements of all, in a row.
        wanted: For each tensor, whether it is to be written.
    """
    are_rows = all(target.dim() == 1 for target in targets)
    parts = torch.split(flat, list(map(torch.numel, targets))) if are_rows else views_of(flat, targets)
    pairs = [pair[:2] for pair in zip(targets, parts, wanted, strict=True) if pair[2]]
    pairs = [_distinct(*pair) if 0 in pair[0].stride() else pair for pair in pairs]
    if pairs:
        copy_all_(*zip(*pairs, strict=True))


def _distinct(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    one = tuple(slice(1) if stride == 0 else slice(None) for stride in target.stride())
    return target[one], source[one]


def divide_into_buckets(
    tensors: Sequence[Tensor], members: Iterable[int], cap: int = _BUCKET_BYTES, first_cap: int | None = None
) -> list[list[int]]:
    """Divide positions of tensors, in order, by type and device into buckets that end once they reach `cap` bytes."""
    buckets: list[list[int]] = []
    unfinished: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for member in members:
        tensor = tensors[member]
        kind = (tensor.dtype, tensor.device)
        unfinished.setdefault(kind, []).append(member)
        sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
        if sizes[kind] >= (cap if buckets or first_cap is None else first_cap):
            buckets.append(unfinished.pop(kind))
            del sizes[kind]
    return buckets + list(unfinished.values())


def _dense(tensors: Sequence[Tensor]) -> list[int]:
    return [number for number, one in enumerate(tensors) if one.layout == torch.strided and one.numel()]

"""Many small tensors sent in a few flat buckets."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext._compat.torch import copy_all_, flatten, views_of

_BUCKET_BYTES = 25 * 2**20  # what torch's own DistributedDataParallel uses


def send_all(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Return tensors of one device on each of several devices, in flat buckets: one transfer per bucket and device."""
    if not tensors or all(to == tensors[0].device for to in devices):
        return [list(tensors) for _ in devices]
    dense = _dense(tensors)
    in_buckets = set(dense)
    sent = [[one if number in in_buckets else one.to(to) for number, one in enumerate(tensors)] for to in devices]
    away = [(to, on_device) for to, on_device in zip(devices, sent, strict=True) if dense and to != tensors[0].device]
    for bucket in divide_into_buckets(tensors, dense) if away else ():
        members = [tensors[position] for position in bucket]
        flat = torch.cat([member.reshape(-1) for member in members])
        for device, on_device in away:
            parts = torch.split(flat.to(device, non_blocking=True), [member.numel() for member in members])
            for position, member, part in zip(bucket, members, parts, strict=True):
                on_device[position] = part.view(member.shape)
    return sent


@torch.no_grad()
def broadcast_all(tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrite dense tensors with the values of one rank, in flat buckets; sparse tensors stay unchanged."""
    for bucket in divide_into_buckets(tensors, _dense(tensors)):
        members = [tensors[position] for position in bucket]
        flat = flatten(members)
        # As bytes: no backend supports every dtype.
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=source)
        overwrite(members, flat)


@torch.no_grad()
def overwrite(targets: Sequence[Tensor], flat: Tensor) -> None:
    """Write flat values into several non-empty tensors in few kernel launches, memory shared by `expand` once."""
    are_rows = all(target.dim() == 1 for target in targets)
    parts = torch.split(flat, list(map(torch.numel, targets))) if are_rows else views_of(flat, targets)
    pairs = [_distinct(*pair) if 0 in pair[0].stride() else pair for pair in zip(targets, parts, strict=True)]
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

"""States of metrics, synchronised even if ranks have made different numbers of updates."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_ddp_ext._compat.torchmetrics import Gather, list_states, tensor_states
from lightning_ddp_ext.distributed.exchange import gather_different
from lightning_ddp_ext.errors import UnsupportedFeatureError

_NO_TENSOR = "no tensor"
_NOTHING: tuple[int, str, list[int], str] = (0, "", [], "")


def synchronize_states(
    metric: Metric, synchronize: Callable[[Gather], None], gather: Gather, group: dist.ProcessGroup | None
) -> None:
    """Synchronise a metric's states with the same collectives on all ranks, however many updates each rank has made.

    `synchronize` is torchmetrics' own function, which gathers as many entries as this rank has, in its shape and dtype.
    So lists are padded to the longest list and the padding is dropped from the result; states take the shape of ranks
    that have made an update, and a dtype that holds the values of all ranks.
    """
    tensors, lists = tensor_states(metric), list_states(metric)
    own = {
        "is_updated": metric.update_count > 0,
        "tensors": {name: _describe([value]) for name, value in tensors.items()},
        "lists": {name: _describe(entries) for name, entries in lists.items()},
    }
    of_ranks = gather_different(own, group)
    if len(of_ranks) == 1:  # all ranks have the same
        synchronize(gather)
        return
    for name, value in tensors.items():
        forms = [None if row is None else (row["is_updated"], *row["tensors"][name]) for row in of_ranks]
        setattr(metric, name, _in_common_form(value, forms, f"`{name}` of `{type(metric).__name__}`"))
    owners: dict[int, list[int]] = {}  # ranks, by the identity of an entry
    for name, entries in lists.items():
        described = [_NOTHING if row is None else row["lists"][name] for row in of_ranks]
        numbers = [number for number, *_ in described]
        _, dtype, shape, device_type = max(described, key=lambda each: each[0])
        if dtype == _NO_TENSOR:
            if len(set(numbers)) > 1:
                raise UnsupportedFeatureError(
                    f"`{type(metric).__name__}` keeps {min(numbers)} to {max(numbers)} entries of `{name}` on ranks 0"
                    f" to {len(numbers) - 1}, which torchmetrics can gather only if all ranks have equally many. Keep"
                    " tensors in its states, or give all ranks equally many samples to evaluate."
                )
            continue
        device = metric.device if metric.device.type == device_type else torch.device(device_type or "cpu")
        common = _common_dtype([dtype for number, dtype, *_ in described if number])
        # Each entry another object, since `owners` refers to identities.
        filled = [entry.to(common).view_as(entry) for entry in entries]
        while len(filled) < max(numbers):
            size = [0, *shape[1:]] if shape else []  # gathering needs equally many dimensions on all ranks
            filled.append(torch.zeros(size, dtype=common, device=device))
        for position, entry in enumerate(filled):
            owners[id(entry)] = [rank for rank, number in enumerate(numbers) if number > position]
        setattr(metric, name, filled)

    def gather_entries(tensor: Tensor, group: Any | None = None) -> list[Tensor]:
        gathered = gather(tensor, group=group)
        return [gathered[rank] for rank in owners.get(id(tensor), range(len(gathered)))]

    synchronize(gather_entries)


def _describe(entries: Sequence[Any]) -> tuple[int, str, list[int], str]:
    """Return the number of entries, the dtype that holds all of them, and shape and device type of the first one."""
    if not entries:
        return _NOTHING
    if not all(isinstance(entry, Tensor) for entry in entries):
        return len(entries), _NO_TENSOR, [], ""
    first = entries[0]
    dtype = functools.reduce(torch.promote_types, (entry.dtype for entry in entries))
    return len(entries), str(dtype).removeprefix("torch."), list(first.shape), first.device.type


def _common_dtype(names: Sequence[str]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (getattr(torch, name) for name in names), torch.bool)


def _in_common_form(value: Tensor, described: Sequence[Any], state: str) -> Tensor:
    """Return a state in a common form, given for each rank whether it has made an update, and `_describe` of it."""
    rows = [row for row in described if row is not None]
    made = [shape for is_updated, _, _, shape, _ in rows if is_updated] or [shape for _, _, _, shape, _ in rows]
    shape = made[0]
    if any(other != shape for other in made) or not all(_can_become(row[3], shape) for row in rows):
        shapes = ", ".join("none" if row is None else str(row[3]) for row in described)
        raise UnsupportedFeatureError(
            f"{state} has the shapes {shapes} on ranks 0 to {len(described) - 1}, which cannot be combined. Give"
            " states that differ between ranks the default `[]`, and `dist_reduce_fx='cat'`."
        )
    return value.to(_common_dtype([dtype for _, _, dtype, _, _ in rows])).expand(shape).contiguous()


def _can_become(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if a tensor of one shape can be expanded to another."""
    return len(shape) <= len(other) and all(
        own in (1, wanted) for own, wanted in zip(reversed(shape), reversed(other), strict=False)
    )

"""Metrics that keep lists, in which ranks may have any number of entries when they are synchronised."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_ddp_ext._compat.torchmetrics import Gather, list_states
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.parallel.messages.exchange import gather_objects

_OTHER = "other"  # than a tensor
_NOTHING: tuple[int, str, list[int], str] = (0, "", [], "")


def synchronize_lists(
    metric: Metric, synchronize: Callable[[Gather], None], gather: Gather, group: dist.ProcessGroup | None
) -> None:
    """Synchronise a metric's states, with the same collectives on all ranks whatever their lists hold.

    torchmetrics gathers lists entry by entry, as many as this rank has; an empty list that is to be concatenated as a
    vector of floats. Here lists are filled up to the longest, and what fills them is left out of what is gathered.

    Args:
        metric: The metric; its states are replaced, as by `synchronize`.
        synchronize: Gathers and reduces each state by the function that it is given.
        gather: Returns the tensor of each rank of a group.
        group: The ranks; None for all.

    Raises:
        UnsupportedFeatureError: If entries are no tensors, and ranks have different numbers of them.
    """
    lists = list_states(metric)
    gathered = gather_objects([_describe(entries) for entries in lists.values()], group) if lists else []
    by_rank = [[_NOTHING] * len(lists) if described is None else described for described in gathered]
    owners: dict[int, list[int]] = {}  # ranks, by the identity of an entry
    for (name, entries), described in zip(lists.items(), zip(*by_rank, strict=True), strict=True):
        numbers = [number for number, *_ in described]
        _, dtype, shape, device_type = max(described, key=lambda each: each[0])
        if dtype == _OTHER:
            _check_equal(numbers, metric, name)
            continue
        device = metric.device if metric.device.type == device_type else torch.device(device_type or "cpu")
        filled = [entry.view_as(entry) for entry in entries]  # each an object of its own
        while len(filled) < max(numbers):
            # Gathering needs as many dimensions everywhere.
            size = [0, *shape[1:]] if shape else []
            filled.append(torch.zeros(size, dtype=getattr(torch, dtype), device=device))
        for position, entry in enumerate(filled):
            owners[id(entry)] = [rank for rank, number in enumerate(numbers) if number > position]
        setattr(metric, name, filled)

    def gather_entries(tensor: Tensor, group: Any | None = None) -> list[Tensor]:
        gathered = gather(tensor, group=group)
        return [gathered[rank] for rank in owners.get(id(tensor), range(len(gathered)))]

    synchronize(gather_entries)


def _describe(entries: Sequence[Any]) -> tuple[int, str, list[int], str]:
    """Describe a list: number, and the dtype, shape and type of device of the first entry."""
    if not entries:
        return _NOTHING
    if not all(isinstance(entry, Tensor) for entry in entries):
        return len(entries), _OTHER, [], ""
    first = entries[0]
    return len(entries), str(first.dtype).removeprefix("torch."), list(first.shape), first.device.type


def _check_equal(numbers: Sequence[int], metric: Metric, name: str) -> None:
    if len(set(numbers)) > 1:
        raise UnsupportedFeatureError(
            f"`{type(metric).__name__}` keeps {min(numbers)} to {max(numbers)} entries of `{name}` on ranks 0 to"
            f" {len(numbers) - 1}, which torchmetrics can gather only if all ranks have equally many. Keep tensors in"
            " its states, or give all ranks equally much to evaluate."
        )

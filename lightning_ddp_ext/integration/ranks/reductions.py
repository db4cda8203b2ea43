"""Reducing values over ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def widened(tensor: Any, reduce_op: dist.ReduceOp | str | None) -> Any:
    """Return whole numbers as floating-point ones if their mean is wanted, which Lightning would cut off."""
    is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    is_whole = isinstance(tensor, Tensor) and not tensor.is_floating_point() and not tensor.is_complex()
    return tensor.double() if is_mean and is_whole else tensor


def sums_and_means(values: Tensor, weight: float | None, add_up: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sums and the weighted means of values over ranks, in double precision. One reduction.

    If all weights are zero, or one is unknown and thus nan, the means weigh the ranks equally.

    Args:
        values: One dimension, equally many on all ranks.
        weight: Weight of this rank; None for a rank without values, which is in no sum and no mean.
        add_up: Adds a tensor up over the ranks.
    """
    own = torch.zeros(2, len(values) + 1, dtype=torch.float64, device=values.device)
    if weight is not None:
        own[0, :-1], own[0, -1] = values, 1.0
        # The loss of a batch without weight may be a mean over nothing, thus nan.
        own[1] = own[0] * weight if weight else 0.0
    totals = add_up(own)
    equal, weighted = totals[:, :-1] / totals[:, -1:]
    return totals[0, :-1], torch.where(totals[1, -1] > 0, weighted, equal)

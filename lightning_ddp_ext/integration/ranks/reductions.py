"""Reducing values over ranks."""

from typing import Any

import torch.distributed as dist
from torch import Tensor


def widened(tensor: Any, reduce_op: dist.ReduceOp | str | None) -> Any:
    """Return whole numbers as floating-point ones if their mean is wanted, which Lightning would cut off."""
    is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    is_whole = isinstance(tensor, Tensor) and not tensor.is_floating_point() and not tensor.is_complex()
    return tensor.double() if is_mean and is_whole else tensor

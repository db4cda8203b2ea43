"""The arguments that replicas have given to a metric, as those of one call for the whole batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext.parallel.batches.containers import to_device


def is_scalar(value: Any) -> bool:
    """Tell whether an argument is one number."""
    return (isinstance(value, Tensor) and value.ndim == 0) or (
        isinstance(value, int | float) and not isinstance(value, bool)
    )


def is_whole(value: Any) -> bool:
    """Tell whether a number is a whole one."""
    return isinstance(value, int) or (isinstance(value, Tensor) and not value.is_floating_point())


def can_join(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Tell whether what each replica has given makes what one call is given; `sizes` are those of the chunks."""
    first = values[0]
    if isinstance(first, dict):
        return all(value.keys() == first.keys() for value in values) and all(
            can_join([value[key] for value in values], sizes) for key in first
        )
    if isinstance(first, tuple):
        return len(set(map(len, values))) == 1 and all(can_join(items, sizes) for items in zip(*values, strict=True))
    if isinstance(first, list):
        has_tensors = any(isinstance(item, Tensor) for value in values for item in value)
        return not has_tensors or _are_columns(values, sizes) or list(map(len, values)) == list(sizes)
    # Equal texts may be two samples.
    is_joined = isinstance(first, Tensor) or is_scalar(first)
    return is_joined or (not isinstance(first, str) and all(value is first for value in values))


def join(values: Sequence[Any], weights: Sequence[float], sizes: Sequence[int], device: torch.device) -> Any:
    """Make one argument of those of the replicas.

    Args:
        values: What each replica has given.
        weights: What each of their chunks counts.
        sizes: Samples in each of them.
        device: Where the argument is needed.

    Returns:
        Tensors and lists are concatenated, lists of columns column by column, floating-point scalars averaged by
        weight, whole numbers that were counted are added; of anything else the first.
    """
    first = values[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat([value.detach().to(device) for value in values])
    if is_scalar(first):
        return _join_scalars(to_device(list(values), device), weights, sizes)
    if isinstance(first, dict):
        return {key: join([value[key] for value in values], weights, sizes, device) for key in first}
    if isinstance(first, tuple):
        return tuple(join(items, weights, sizes, device) for items in zip(*values, strict=True))
    if isinstance(first, list):
        if _are_columns(values, sizes):
            return [join(items, weights, sizes, device) for items in zip(*values, strict=True)]
        return [to_device(item, device) for value in values for item in value]
    return first


def _are_columns(lists: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    """Return True if lists hold tensors with a row per sample, such as `[target, weight]`; a weight may be None."""

    def has_row_per_sample(items: tuple[Any, ...]) -> bool:
        return all(
            isinstance(item, Tensor) and item.ndim > 0 and item.size(0) == size
            for item, size in zip(items, sizes, strict=True)
        )

    if len(set(map(len, lists))) > 1:
        return False
    columns = [items for items in zip(*lists, strict=True) if any(item is not None for item in items)]
    return bool(columns) and all(map(has_row_per_sample, columns))


def _join_scalars(values: Sequence[Any], weights: Sequence[float], sizes: Sequence[int]) -> Any:
    values = [value.detach() if isinstance(value, Tensor) else value for value in values]
    first = values[0]
    if isinstance(first, Tensor):
        if not first.is_floating_point():
            return torch.stack(values).sum()
    elif isinstance(first, int):
        was_counted = list(values) == list(sizes) or len(set(values)) > 1
        return sum(values) if was_counted else first
    return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight) / (sum(weights) or 1)

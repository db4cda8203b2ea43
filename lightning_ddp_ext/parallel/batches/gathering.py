"""Putting the outputs of replicas together again."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext.parallel.batches.containers import (
    fields,
    is_object,
    rebuild,
    rebuild_mapping,
    rebuild_object,
    to_device,
)


def gather(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    device: torch.device,
    batch_dim: int = 0,
    other_rows: Sequence[Sequence[int]] = (),
) -> Any:
    """Put the outputs of the replicas together as one device would have returned them.

    Tensors with one row per sample are concatenated in the order of the batch; floating-point tensors without
    dimensions are averaged by chunk size; lists with one entry per sample are joined; mappings, dataclasses, tuples
    and lists are gathered entry by entry. Values that fit none of these come back as a list with one entry per replica.

    Args:
        outputs: What each active replica returned.
        sizes: Chunk size of each of them.
        device: Where tensors are gathered.
        batch_dim: The dimension of tensors that counts samples.
        other_rows: Other numbers of rows that the tensors of each replica may have, such as one per node of its graphs.

    Returns:
        The gathered output.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return to_device(first, device)
    if isinstance(first, Tensor):
        return _gather_tensors([to_device(output, device) for output in outputs], sizes, batch_dim, other_rows)
    if isinstance(first, Mapping) and all(output.keys() == first.keys() for output in outputs):
        items = {
            key: gather([output[key] for output in outputs], sizes, device, batch_dim, other_rows) for key in first
        }
        return rebuild_mapping(first, items)
    if is_object(first):
        values = {name: [getattr(output, name, None) for output in outputs] for name in fields(first)}
        return rebuild_object(
            first, {name: gather(column, sizes, device, batch_dim, other_rows) for name, column in values.items()}
        )
    if isinstance(first, list | tuple):
        lengths = [len(output) for output in outputs]
        same_length = len(set(lengths)) == 1
        if lengths == list(sizes) and not (same_length and _is_columnar(outputs, sizes)):
            return rebuild(first, [to_device(item, device) for output in outputs for item in output])
        if same_length:
            columns = zip(*outputs, strict=True)
            return rebuild(first, [gather(column, sizes, device, batch_dim, other_rows) for column in columns])
    if all(output is None for output in outputs):
        return None
    return [to_device(output, device) for output in outputs]


def _is_columnar(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Tell a pair of tensors (one row per sample each) from a list with one entry per sample."""
    return isinstance(outputs[0], tuple) or all(
        isinstance(item, Tensor) and item.ndim > 0 and item.size(0) == size
        for output, size in zip(outputs, sizes, strict=True)
        for item in output
    )


def _gather_tensors(
    tensors: Sequence[Tensor], sizes: Sequence[int], batch_dim: int, other_rows: Sequence[Sequence[int]]
) -> Any:
    if all(tensor.ndim == 0 and tensor.is_floating_point() for tensor in tensors):
        total = sum(sizes)
        return sum(tensor * (size / total) for tensor, size in zip(tensors, sizes, strict=True))
    for dim, rows in [(batch_dim, sizes), (0, sizes), *((0, rows) for rows in other_rows)]:
        if all(tensor.ndim > dim and tensor.size(dim) == size for tensor, size in zip(tensors, rows, strict=True)):
            return torch.cat(list(tensors), dim)
    return list(tensors)

"""Cutting a nested batch into chunks, and putting the replicas' outputs together again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext.errors import BatchSplitError

_REMEDY = "Yield batches whose tensors have the same number of samples along `batch_dim`."


def batch_size_of(batch: Any, batch_dim: int = 0) -> int:
    """Count the samples of a batch.

    The size is that of every tensor along `batch_dim`; tensors without dimensions do not count. A batch that consists
    of equally long lists (detection: a list of images and a list of targets) has as many samples as they have entries,
    and a flat list without tensors as many as its entries.

    Args:
        batch: Tensors in nested dictionaries, lists, tuples and named tuples.
        batch_dim: The dimension of the tensors that counts samples.

    Returns:
        The number of samples.

    Raises:
        BatchSplitError: If tensors disagree, or if there is nothing to count.
    """
    sizes = dict(_tensor_sizes(batch, batch_dim, "batch"))
    if len(set(sizes.values())) == 1:
        return next(iter(sizes.values()))
    columns = _columns(batch)
    if columns is not None:
        return columns
    if not sizes and isinstance(batch, list | tuple) and batch:
        return len(batch)
    if not sizes:
        raise BatchSplitError(
            f"the batch of type `{type(batch).__name__}` has no tensor with dimension {batch_dim} to split. {_REMEDY}"
        )
    listed = ", ".join(f"`{path}` has {size}" for path, size in sizes.items())
    raise BatchSplitError(f"the batch size is ambiguous: {listed}. {_REMEDY}")


def split_batch(batch: Any, sizes: Sequence[int], batch_dim: int = 0) -> list[Any]:
    """Cut a batch into consecutive chunks.

    Chunks are views: nothing is copied or moved. What has no batch dimension (numbers, strings, tensors without
    dimensions) is in every chunk.

    Args:
        batch: See `batch_size_of`.
        sizes: Chunk sizes; they add up to the size of the batch.
        batch_dim: The dimension of the tensors that counts samples.

    Returns:
        One chunk of the type of the batch per size; None where the size is 0.
    """
    total = sum(sizes)
    by_tensors = {size for _, size in _tensor_sizes(batch, batch_dim, "batch")} == {total}
    if not by_tensors and _columns(batch) == total:
        cut: Callable[[int, int], Any] = lambda start, stop: _map_items(batch, lambda column: column[start:stop])  # noqa: E731
    else:
        cut = lambda start, stop: _slice(batch, start, stop, total, batch_dim)  # noqa: E731
    chunks: list[Any] = []
    start = 0
    for size in sizes:
        chunks.append(cut(start, start + size) if size else None)
        start += size
    return chunks


def _tensor_sizes(value: Any, batch_dim: int, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, Tensor):
        if value.ndim > batch_dim:
            yield path, value.size(batch_dim)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensor_sizes(item, batch_dim, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensor_sizes(item, batch_dim, f"{path}[{index}]")


def _columns(batch: Any) -> int | None:
    """Length of the columns of a batch that is a sequence of equally long sequences."""
    if not isinstance(batch, list | tuple) or not batch:
        return None
    if not all(isinstance(column, list | tuple) for column in batch):
        return None
    lengths = {len(column) for column in batch}
    return lengths.pop() if len(lengths) == 1 else None


def _slice(value: Any, start: int, stop: int, total: int, batch_dim: int) -> Any:
    if isinstance(value, Tensor):
        has_batch = value.ndim > batch_dim and value.size(batch_dim) == total
        return value.narrow(batch_dim, start, stop - start) if has_batch else value
    if isinstance(value, list | tuple) and len(value) == total and not any(True for _ in _tensor_sizes(value, 0, "")):
        return _rebuild(value, list(value[start:stop]))
    return _map_items(value, lambda item: _slice(item, start, stop, total, batch_dim))


def _map_items(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the items of a container; anything else is returned as it is."""
    if isinstance(value, Mapping):
        items = {key: function(item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return _rebuild(value, [function(item) for item in value])
    return value


def _rebuild(value: Any, items: list[Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items)


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors of a nested value to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return _map_items(value, lambda item: to_device(item, device))


def gather(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device, batch_dim: int = 0) -> Any:
    """Put the outputs of the replicas together as one device would have returned them.

    Tensors with one row per sample are concatenated in the order of the batch; floating-point tensors without
    dimensions are averaged by chunk size; lists with one entry per sample are joined; dictionaries, tuples and lists
    are gathered entry by entry. Values that fit none of these come back as a list with one entry per replica.

    Args:
        outputs: What each active replica returned.
        sizes: Chunk size of each of them.
        device: Where tensors are gathered.
        batch_dim: The dimension of tensors that counts samples.

    Returns:
        The gathered output.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return to_device(first, device)
    if isinstance(first, Tensor):
        return _gather_tensors([to_device(output, device) for output in outputs], sizes, batch_dim)
    if isinstance(first, Mapping) and all(output.keys() == first.keys() for output in outputs):
        items = {key: gather([output[key] for output in outputs], sizes, device, batch_dim) for key in first}
        return items if type(first) is dict else type(first)(items)  # type: ignore[call-arg]
    if isinstance(first, list | tuple):
        lengths = [len(output) for output in outputs]
        same_length = len(set(lengths)) == 1
        if lengths == list(sizes) and not (same_length and _is_columnar(outputs, sizes)):
            return _rebuild(first, [to_device(item, device) for output in outputs for item in output])
        if same_length:
            columns = zip(*outputs, strict=True)
            return _rebuild(first, [gather(column, sizes, device, batch_dim) for column in columns])
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


def _gather_tensors(tensors: Sequence[Tensor], sizes: Sequence[int], batch_dim: int) -> Any:
    if all(tensor.ndim == 0 and tensor.is_floating_point() for tensor in tensors):
        total = sum(sizes)
        return sum(tensor * (size / total) for tensor, size in zip(tensors, sizes, strict=True))
    for dim in dict.fromkeys((batch_dim, 0)):
        if all(tensor.ndim > dim and tensor.size(dim) == size for tensor, size in zip(tensors, sizes, strict=True)):
            return torch.cat(list(tensors), dim)
    return list(tensors)

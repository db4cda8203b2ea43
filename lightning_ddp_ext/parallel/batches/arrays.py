"""The arrays in a batch: how many samples one holds, cutting it, and finding those that hide in other objects."""

import enum
import itertools
import types
from collections import UserList, deque
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_ddp_ext.errors import BatchSplitError
from lightning_ddp_ext.parallel.batches.containers import items

_PLAIN = (str, bytes, int, float, complex, type(None), type, enum.Enum, types.FunctionType, types.ModuleType)
_DEPTH, _LOOKED_AT = 4, 100


def is_array(value: Any) -> bool:
    """Tell a tensor, an array, a packed sequence or a batch of graphs from anything else."""
    if isinstance(value, Tensor | PackedSequence) or (hasattr(value, "ndim") and hasattr(value, "shape")):
        return True
    return is_graph_batch(value)


def is_graph_batch(value: Any) -> bool:
    """Return True if a value can be taken apart into graphs and rebuilt from them, as PyTorch Geometric's `Batch`."""
    return hasattr(type(value), "to_data_list") and hasattr(type(value), "from_data_list")


def can_be_cut(array: Any) -> bool:
    """Tell whether rows can be taken from an array; compressed sparse tensors have none to take."""
    return not isinstance(array, Tensor) or array.layout in (torch.strided, torch.sparse_coo, torch.jagged)


def count_rows(array: Any, dim: int) -> int | None:
    """Count the samples in an array; None if it has no such dimension.

    A packed sequence and a nested tensor have as many as they have sequences, and a batch of graphs as many as it has
    graphs, whatever the dimension.
    """
    if is_graph_batch(array):
        return int(array.num_graphs) if hasattr(array, "num_graphs") else len(array.to_data_list())
    if isinstance(array, PackedSequence):
        return int(array.batch_sizes[0])
    if isinstance(array, Tensor) and array.is_nested:
        return array.size(0)
    return array.shape[dim] if array.ndim > dim else None


def may_be_one_sample(batch: Any) -> bool:
    """Return True if a batch has a dimension, list or tuple of size 1, or no arrays that could tell."""
    lengths: list[int] = []
    sizes: list[Any] = []

    def look(value: Any) -> None:
        if is_array(value):
            has_shape = not is_graph_batch(value) and not isinstance(value, PackedSequence)
            is_nested = isinstance(value, Tensor) and value.is_nested
            sizes.extend(value.shape if has_shape and not is_nested else [count_rows(value, 0)])
            return
        if isinstance(value, list | tuple):
            lengths.append(len(value))
        for _, item in items(value):
            look(item)

    look(batch)
    return not sizes or 1 in sizes or 1 in lengths


def take_rows(array: Any, dim: int, start: int, stop: int) -> Any:
    """Take consecutive samples from an array; a view, unless it is sparse, nested, packed or a batch of graphs."""
    if is_graph_batch(array):
        return _take_graphs(array, start, stop)
    if isinstance(array, PackedSequence):
        return pack_sequence(unpack_sequence(array)[start:stop], enforce_sorted=array.sorted_indices is None)
    if isinstance(array, Tensor) and array.is_nested:
        return torch.nested.as_nested_tensor(list(array.unbind())[start:stop], layout=array.layout)
    if isinstance(array, Tensor) and array.is_sparse:
        return array.narrow_copy(dim, start, stop - start)
    return array[start:stop] if dim == 0 else array[(slice(None),) * dim + (slice(start, stop),)]


def _take_graphs(batch: Any, start: int, stop: int) -> Any:
    if (start, stop) == (0, count_rows(batch, 0)):
        return batch
    if hasattr(batch, "get_example"):  # PyTorch Geometric's, which does not take the other graphs apart
        graphs = [batch.get_example(index) for index in range(start, stop)]
    else:
        graphs = batch.to_data_list()[start:stop]
    names = _keys(batch)
    # PyTorch Geometric's loaders add `<name>_batch` for each name in `follow_batch`; graphs do not keep it.
    followed = [name for name in names if f"{name}_batch" in names]
    chunk = type(batch).from_data_list(graphs, **({"follow_batch": followed} if followed else {}))
    if lost := sorted(names - _keys(chunk)):
        raise BatchSplitError(
            f"{', '.join(f'`{name}`' for name in lost)} of the batch of graphs does not belong to its graphs, so"
            " chunks would lose it. Set it on each graph before they are collated, or define"
            " `scatter_batch(batch, split)` on the module."
        )
    return chunk


def _keys(batch: Any) -> set[str]:
    keys = getattr(batch, "keys", ())
    return set(keys() if callable(keys) else keys)


def rows_of_graphs(chunk: Any) -> Iterator[int]:
    """Yield the numbers of nodes and edges in each batch of graphs of a chunk: outputs may have as many rows."""
    if is_graph_batch(chunk):
        yield from (getattr(chunk, name) for name in ("num_nodes", "num_edges") if hasattr(chunk, name))
    for _, item in items(chunk):
        yield from rows_of_graphs(item)


def hides_array(value: Any, depth: int = _DEPTH) -> bool:
    """Tell whether an array is found in an object, its attributes or its entries, not too deep inside."""
    if isinstance(value, _PLAIN):
        return False
    if is_array(value):
        return True
    if depth == 0:
        return False
    slots = [name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    parts = itertools.chain(
        (item for _, item in items(value)),
        value if isinstance(value, Set | deque | UserList) else (),
        (getattr(value, name, None) for name in slots),
        getattr(value, "__dict__", {}).values(),
    )
    return any(hides_array(part, depth - 1) for part in itertools.islice(parts, _LOOKED_AT))


def _names(slots: Any) -> Any:
    return (slots,) if isinstance(slots, str) else slots

"""The arrays in a batch: how many samples one holds, cutting it, and finding those that hide in other objects."""

import enum
import itertools
import types
from collections import UserList, deque
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_ddp_ext.parallel.batches.containers import items

_PLAIN = (str, bytes, int, float, complex, type(None), type, enum.Enum, types.FunctionType, types.ModuleType)
_DEPTH, _LOOKED_AT = 4, 100


def is_array(value: Any) -> bool:
    """Tell a tensor, an array or a packed sequence from anything else."""
    return isinstance(value, Tensor | PackedSequence) or (hasattr(value, "ndim") and hasattr(value, "shape"))


def can_be_cut(array: Any) -> bool:
    """Tell whether rows can be taken from an array; compressed sparse tensors have none to take."""
    return not isinstance(array, Tensor) or array.layout in (torch.strided, torch.sparse_coo, torch.jagged)


def count_rows(array: Any, dim: int) -> int | None:
    """Count the samples in an array; None if it has no such dimension.

    A packed sequence and a nested tensor have as many as they have sequences, whatever the dimension.
    """
    if isinstance(array, PackedSequence):
        return int(array.batch_sizes[0])
    if isinstance(array, Tensor) and array.is_nested:
        return array.size(0)
    return array.shape[dim] if array.ndim > dim else None


def take_rows(array: Any, dim: int, start: int, stop: int) -> Any:
    """Take consecutive samples from an array; a view, unless it is sparse, nested or packed."""
    if isinstance(array, PackedSequence):
        return pack_sequence(unpack_sequence(array)[start:stop], enforce_sorted=array.sorted_indices is None)
    if isinstance(array, Tensor) and array.is_nested:
        return torch.nested.as_nested_tensor(list(array.unbind())[start:stop], layout=array.layout)
    if isinstance(array, Tensor) and array.is_sparse:
        return array.narrow_copy(dim, start, stop - start)
    return array[start:stop] if dim == 0 else array[(slice(None),) * dim + (slice(start, stop),)]


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

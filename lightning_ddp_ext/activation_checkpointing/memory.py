"""Measuring what recomputed segments keep in memory between the forward and the backward pass."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import WeakStorage, never_compiled, saved_tensor_hooks
from lightning_ddp_ext.batches.containers import items

_MAX_DEPTH = 4

_Sizes = dict[WeakStorage, int]


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """What segments keep for the backward pass, in bytes, parameters and buffers aside.

    Attributes:
        calls: Forward passes of segments that were measured.
        without: Kept if nothing were recomputed.
        kept: Kept now: what enters the segments and what leaves them.
    """

    calls: int
    without: int
    kept: int

    @property
    def saved(self) -> int:
        """Bytes that recomputation saves; negative if segments are so small that their inputs take more."""
        return self.without - self.kept


class SegmentCall:
    """One forward pass of a segment: what autograd asks to keep, and what enters and leaves.

    Args:
        graph: An object that lives as long as the graph of this forward pass.
        inputs: Arguments of the segment.
    """

    def __init__(self, graph: object, inputs: Any) -> None:
        self._graph = weakref.ref(graph)
        self.asked: _Sizes = {}
        self.inputs = _storages(inputs)
        self.outputs: _Sizes = {}

    @property
    def is_pending(self) -> bool:
        """Whether a backward pass can still reach this forward pass."""
        return self._graph() is not None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Notice what autograd asks to keep; what becomes of it is decided by the hooks around."""
        pack, unpack = saved_tensor_hooks()

        @never_compiled  # compiled code calls it for what it keeps, and must not include it
        def notice_and_pack(tensor: Tensor) -> Any:
            self.asked.update(_storages(tensor))
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(notice_and_pack, unpack):
            yield

    def leave(self, outputs: Any) -> None:
        """Notice what leaves the segment: whatever comes next holds it."""
        self.outputs = _storages(outputs)


class MemoryMeter:
    """Measures one forward pass of a module, until its backward pass begins.

    Nothing runs twice for it: autograd asks to keep the same tensors as ever, and those whose memory is free again when
    the backward pass begins are what recomputation saves. A storage counts once, however many tensors share it.

    Args:
        root: The whole module; its parameters and buffers do not count.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root: nn.Module | None = root
        self._calls: list[SegmentCall] = []
        self.memory: ActivationMemory | None = None

    def add(self, graph: object, inputs: Any) -> SegmentCall | None:
        """Begin to measure a call of a segment, unless the measurement is over."""
        if self.memory is not None:
            return None
        # A forward pass without a backward pass, such as that of a skipped batch, must not count.
        self._calls = [call for call in self._calls if call.is_pending]
        self._calls.append(SegmentCall(graph, inputs))
        return self._calls[-1]

    def close(self) -> None:
        """Count what was kept and what was not, now that a backward pass begins; later calls do nothing."""
        if self._root is None:
            return
        calls = [call for call in self._calls if call.is_pending]
        fixed = set(_storages([*self._root.parameters(), *self._root.buffers()]))
        asked, inputs, outputs = (
            {storage: size for call in calls for storage, size in getattr(call, kind).items() if storage not in fixed}
            for kind in ("asked", "inputs", "outputs")
        )
        # The backward pass has released the loss already, and with it, perhaps, what left the last segment.
        kept = {storage: size for storage, size in asked.items() if storage in outputs or not storage.expired()}
        self.memory = ActivationMemory(len(calls), sum(asked.values()), sum({**kept, **inputs}.values()))
        self._root, self._calls = None, []


def _storages(value: Any) -> _Sizes:
    """Find the memory behind the tensors of a nested value, with its size in bytes."""
    storages = [tensor.untyped_storage() for tensor in _tensors(value) if tensor.layout is torch.strided]
    return {WeakStorage(storage): storage.nbytes() for storage in storages}  # type: ignore[no-untyped-call]


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth < _MAX_DEPTH:
        yield from chain.from_iterable(_tensors(item, depth + 1) for _, item in items(value))

"""One module whose forward pass is computed again in the backward pass."""

import copy
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ddp_ext._compat.torch import Normalisation, called_attribute, never_compiled, version_of
from lightning_ddp_ext.activation_checkpointing.memory import MemoryMeter
from lightning_ddp_ext.errors import ActivationCheckpointingError

_Place = tuple[nn.Module, str]


@dataclass(frozen=True, slots=True)
class _Copy:
    """What a buffer was.

    Attributes:
        buffer: The tensor.
        version: Its version; -1 if it changes without counting.
        clone: A clone of it.
    """

    buffer: "weakref.ref[Tensor]"
    version: int
    clone: Tensor

    def is_of(self, buffer: Tensor | None) -> bool:
        """Tell whether a buffer is still the same, as far as is counted."""
        return buffer is not None and self.buffer() is buffer and self.version == version_of(buffer) >= 0


class BufferSnapshot:
    """Context of a recomputation: buffers are what they were when the forward pass began, and change for it alone.

    Without it, batch normalisation would update its running statistics twice in a step, and layers that compute with
    buffers they change, such as spectral normalisation, would compute something else than in the forward pass.

    Args:
        copies: What the buffers were, by their owners and names.
        on_enter: Called when the recomputation begins.
    """

    def __init__(self, copies: Sequence[tuple[_Place, _Copy]], on_enter: Callable[[], None] | None = None) -> None:
        self.copies = copies
        self._on_enter = on_enter
        self._meanwhile: list[tuple[nn.Module, dict[str, Tensor | None]]] = []

    def distrust(self, copies: Sequence[_Copy]) -> None:
        """Take the buffers of these copies for changed, whatever their versions say."""
        distrusted = {id(copy): replace(copy, version=-1) for copy in copies}
        self.copies = [(place, distrusted.get(id(copy), copy)) for place, copy in self.copies]

    def __enter__(self) -> None:
        if self._on_enter is not None:
            self._on_enter()
        changed = [(place, copy) for place, copy in self.copies if not copy.is_of(_buffer(place))]
        owners = {id(owner): owner for (owner, _), _ in changed}
        self._meanwhile = [(owner, dict(owner._buffers)) for owner in owners.values()]
        # Cloned again: with `retain_graph=True` a graph is recomputed more than once. What is shared stays shared.
        clones = {id(kept): kept.clone.clone() for _, kept in changed}
        for (owner, name), kept in changed:
            owner._buffers[name] = clones[id(kept)]

    def __exit__(self, *exception: object) -> None:
        for owner, buffers in self._meanwhile:
            owner._buffers.clear()
            owner._buffers.update(buffers)
        self._meanwhile = []


class BufferSnapshots:
    """Takes a snapshot of a module's buffers before each forward pass; only those that have changed are cloned.

    So buffers may begin to change at any time, and one clone of each is kept. A change is known from the tensor's
    version. Running statistics of normalisation layers, whose changes torch does not count, are cloned for every
    forward pass, and so are buffers that are found to change in the same silent way in the first one in a mode of
    training and evaluation.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: dict[int, _Copy] = {}
        self._silent: set[tuple[int, str]] = set()
        self._known_modes: set[tuple[bool, ...]] = set()

    def take(self, on_enter: Callable[[], None] | None = None) -> BufferSnapshot:
        """Take a snapshot; what `on_enter` is, `BufferSnapshot` says."""
        kept, self._copies = self._copies, {}
        copies = []
        for place in ((owner, name) for owner in self._module.modules() for name in owner._buffers):
            buffer = _buffer(place)
            if buffer is not None:
                if id(buffer) not in self._copies:
                    self._copies[id(buffer)] = self._copy(place, buffer, kept.get(id(buffer)))
                copies.append((place, self._copies[id(buffer)]))
        return BufferSnapshot(copies, on_enter)

    def learn(self, snapshot: BufferSnapshot) -> bool:
        """Find out which buffers change silently, if this has not been done in the current mode.

        Args:
            snapshot: Taken before the forward pass that has ended.

        Returns:
            Whether the forward pass has changed buffers, or might in another mode.
        """
        modes = tuple(part.training for part in self._module.modules())
        counted = [(place, copy) for place, copy in snapshot.copies if copy.is_of(_buffer(place))]
        if modes not in self._known_modes:
            self._known_modes.add(modes)
            found = [(place, copy) for place, copy in counted if _differ(copy.clone, _buffer(place))]
            self._silent.update((id(owner), name) for (owner, name), _ in found)
            snapshot.distrust([copy for _, copy in found])
        return len(counted) < len(snapshot.copies) or bool(self._silent)

    def _copy(self, place: _Place, buffer: Tensor, kept: _Copy | None) -> _Copy:
        owner, name = place
        is_silent = isinstance(owner, Normalisation) or (id(owner), name) in self._silent
        if kept is not None and not is_silent and kept.is_of(buffer):
            return kept
        return _Copy(weakref.ref(buffer), -1 if is_silent else version_of(buffer), buffer.detach().clone())


def _buffer(place: _Place) -> Tensor | None:
    owner, name = place
    return owner._buffers.get(name)


def _differ(before: Tensor, after: Tensor | None) -> bool:
    return after is None or before.shape != after.shape or not torch.equal(before, after)


class Segment:
    """Stands in for the forward of a module, as an attribute of that instance.

    So the module tree, the keys of state dicts and the class stay what they are. Hooks of the module itself run once,
    those of modules below it run again when it is recomputed. A deep copy of the module recomputes its own forward
    pass; a pickled module is an ordinary one again.

    Recomputation draws the same random numbers and runs under the same autocast as the forward pass, and with the same
    buffers: running statistics and the like are seen as they were, and change once. They may begin to change at any
    time, except in code that is compiled around the segment: there, what calls have shown before counts. Other state
    that a forward pass changes, such as a counter in an attribute, changes twice. Nothing is recomputed without
    gradients.

    Args:
        module: The module.
        meter: Measures the first forward pass; None to measure nothing.
    """

    def __init__(self, module: nn.Module, meter: MemoryMeter | None = None) -> None:
        self._module = module
        self._attribute = called_attribute(module)
        self._original: Callable[..., Any] | None = module.__dict__.get(self._attribute)
        self._meter = meter
        self._snapshots = BufferSnapshots(module)
        # Whether the forward pass changes buffers, as far as calls have shown.
        self._changes: bool | None = None if any(True for _ in module.buffers()) else False

    @staticmethod
    def find(module: nn.Module) -> "Segment | None":
        """Return what stands in for the forward of a module, or None."""
        return next((value for value in module.__dict__.values() if isinstance(value, Segment)), None)

    def install(self) -> None:
        """Take the place of the module's forward."""
        self._module.__dict__[self._attribute] = self

    def remove(self) -> None:
        """Leave the module as it was."""
        if self._original is None:
            del self._module.__dict__[self._attribute]
        else:
            self._module.__dict__[self._attribute] = self._original

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward that is recomputed; `inspect.signature` asks for it."""
        if self._original is not None:
            return self._original
        return MethodType(type(self._module).forward, self._module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Segment":
        copied = object.__new__(Segment)
        copied._module = copy.deepcopy(self._module, memo)
        copied._attribute = self._attribute
        copied._original = copy.deepcopy(self._original, memo)
        copied._meter = None
        copied._snapshots = BufferSnapshots(copied._module)
        copied._changes = None if self._changes else self._changes
        return copied

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self._original is None:
            return getattr, (self._module, "forward")
        return operator.itemgetter(0), ((self._original,),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; with gradients, so that autograd keeps its arguments only."""
        function = self.__wrapped__
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        args, kwargs = _without_caches(args, kwargs)
        names = tuple(kwargs)
        positional = len(args)

        def call(*values: Any) -> Any:
            return function(*values[:positional], **dict(zip(names, values[positional:], strict=True)))

        # By position: torch restores the random numbers of the devices of those arguments only, and reads some names.
        values = (*args, *kwargs.values())
        if torch.compiler.is_compiling() and self._changes is False:
            # As part of compiled code, a segment could not set buffers back.
            return checkpoint(call, *values, use_reentrant=False)
        return self._recompute(call, values)

    @never_compiled
    def _recompute(self, call: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        measuring = self._meter is not None and self._meter.memory is None
        snapshot = self._snapshots.take(self._meter.close if self._meter is not None and measuring else None)
        if not snapshot.copies and not measuring:
            return checkpoint(call, *values, use_reentrant=False)
        measured = self._meter.add(snapshot, values) if self._meter is not None else None

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext() if measured is None else measured.watch(), snapshot

        outputs = checkpoint(call, *values, use_reentrant=False, context_fn=contexts)
        self._changes = self._snapshots.learn(snapshot)
        if measured is not None:
            measured.leave(outputs)
        return outputs


def _without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave out caches of keys and values, to which a recomputed attention layer would append a second time.

    HuggingFace's models pass an empty one to every layer, for generation, unless `use_cache=False`.

    Raises:
        ActivationCheckpointingError: If a cache holds something, which the layer needs.
    """
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return args, kwargs
    if any(int(cache.get_seq_length()) for cache in caches):
        raise ActivationCheckpointingError(
            f"a module of `activation_checkpointing` was given a {type(caches[0]).__name__} that holds keys and values"
            f" of {int(caches[0].get_seq_length())} tokens, to which its recomputed forward pass would append again."
            " Pass `use_cache=False` to the model while training."
        )
    kept = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if "use_cache" in kept:
        kept["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kept


def _is_cache(value: Any) -> bool:
    return not isinstance(value, Tensor) and hasattr(value, "get_seq_length") and hasattr(value, "update")

"""The forward pass of one module, run again in the backward pass with the buffers and RNG state of the first run."""

import copy
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ddp_ext._compat.torch import Normalisation, called_attribute, never_compiled, version_of
from lightning_ddp_ext.errors import ActivationCheckpointingError

_Place = tuple[nn.Module, str]  # the module that holds a buffer, and the buffer's name


@dataclass(frozen=True, slots=True)
class _Copy:
    """A clone of a buffer, with the version of the buffer; -1 if torch does not count changes of the buffer."""

    buffer: "weakref.ref[Tensor]"
    version: int
    clone: Tensor

    def is_current(self, buffer: Tensor | None) -> bool:
        """Return True if the buffer is the same tensor, unchanged as far as torch counts changes."""
        return buffer is not None and self.buffer() is buffer and self.version == version_of(buffer) >= 0


class BufferSnapshot:
    """Context of the second forward pass: buffers have the values from before the first one.

    Otherwise batch normalisation would update its running statistics twice per step, and spectral normalisation would
    compute something else than in the first forward pass.
    """

    def __init__(self, copies: Sequence[tuple[_Place, _Copy]]) -> None:
        self.copies = copies
        self._current: list[tuple[nn.Module, dict[str, Tensor | None]]] = []

    def mark_changed(self, copies: Sequence[_Copy]) -> None:
        """Restore the buffers of these copies even if their versions are the same."""
        changed = {id(copy): replace(copy, version=-1) for copy in copies}
        self.copies = [(place, changed.get(id(copy), copy)) for place, copy in self.copies]

    def __enter__(self) -> None:
        changed = [(place, copy) for place, copy in self.copies if not copy.is_current(_buffer(place))]
        owners = {id(owner): owner for (owner, _), _ in changed}
        self._current = [(owner, dict(owner._buffers)) for owner in owners.values()]
        # Clone again, since `retain_graph=True` allows several backward passes. A shared buffer gets one clone.
        clones = {id(kept): kept.clone.clone() for _, kept in changed}
        for (owner, name), kept in changed:
            owner._buffers[name] = clones[id(kept)]

    def __exit__(self, *exception: object) -> None:
        for owner, buffers in self._current:
            owner._buffers.clear()
            owner._buffers.update(buffers)
        self._current = []


class BufferSnapshots:
    """Takes a snapshot of a module's buffers before each forward pass, and clones only the buffers that have changed.

    Tensor versions show the changes, except for running statistics, which torch changes without counting. Buffers of
    normalisation layers are therefore always cloned. Any other buffer that changes uncounted is found by comparing
    values in the first forward pass of each combination of training and evaluation modes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: dict[int, _Copy] = {}
        self._uncounted: set[tuple[int, str]] = set()
        self._known_modes: set[tuple[bool, ...]] = set()

    def take(self) -> BufferSnapshot:
        """Take a snapshot."""
        previous, self._copies = self._copies, {}
        copies = []
        for place in ((owner, name) for owner in self._module.modules() for name in owner._buffers):
            buffer = _buffer(place)
            if buffer is not None:
                if id(buffer) not in self._copies:
                    self._copies[id(buffer)] = self._copy(place, buffer, previous.get(id(buffer)))
                copies.append((place, self._copies[id(buffer)]))
        return BufferSnapshot(copies)

    def learn(self, snapshot: BufferSnapshot) -> bool:
        """Compare buffers with the snapshot from before a forward pass; return True if a forward pass changes any."""
        modes = tuple(part.training for part in self._module.modules())
        current = [(place, copy) for place, copy in snapshot.copies if copy.is_current(_buffer(place))]
        if modes not in self._known_modes:
            self._known_modes.add(modes)
            found = [(place, copy) for place, copy in current if _differ(copy.clone, _buffer(place))]
            self._uncounted.update((id(owner), name) for (owner, name), _ in found)
            snapshot.mark_changed([copy for _, copy in found])
        return len(current) < len(snapshot.copies) or bool(self._uncounted)

    def _copy(self, place: _Place, buffer: Tensor, previous: _Copy | None) -> _Copy:
        owner, name = place
        is_uncounted = isinstance(owner, Normalisation) or (id(owner), name) in self._uncounted
        if previous is not None and not is_uncounted and previous.is_current(buffer):
            return previous
        return _Copy(weakref.ref(buffer), -1 if is_uncounted else version_of(buffer), buffer.detach().clone())


def _buffer(place: _Place) -> Tensor | None:
    owner, name = place
    return owner._buffers.get(name)


def _differ(before: Tensor, after: Tensor | None) -> bool:
    return after is None or before.shape != after.shape or not torch.equal(before, after)


class CheckpointedForward:
    """Replaces the forward of one module instance, so that module names, state dict keys and classes do not change.

    Hooks of the module itself run once, hooks of modules below it run again in the backward pass. A deep copy of the
    module checkpoints its own forward; a pickled module is an ordinary one again. The second run has the RNG state, the
    autocast state and the buffers of the first run; other state, such as a counter in an attribute, changes twice.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attribute = called_attribute(module)
        self._original: Callable[..., Any] | None = module.__dict__.get(self._attribute)
        self._snapshots = BufferSnapshots(module)
        # Whether the forward pass changes buffers; None until the first call has shown it.
        self._changes_buffers = None if any(True for _ in module.buffers()) else False

    @staticmethod
    def find(module: nn.Module) -> "CheckpointedForward | None":
        """Return the object that replaces the forward of a module, or None."""
        return next((value for value in module.__dict__.values() if isinstance(value, CheckpointedForward)), None)

    def install(self) -> None:
        """Replace the module's forward."""
        self._module.__dict__[self._attribute] = self

    def remove(self) -> None:
        """Restore the module's forward."""
        if self._original is None:
            del self._module.__dict__[self._attribute]
        else:
            self._module.__dict__[self._attribute] = self._original

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original forward, under the name that `inspect.signature` reads."""
        if self._original is not None:
            return self._original
        return MethodType(type(self._module).forward, self._module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CheckpointedForward":
        copied = object.__new__(CheckpointedForward)
        copied._module = copy.deepcopy(self._module, memo)
        copied._attribute = self._attribute
        copied._original = copy.deepcopy(self._original, memo)
        copied._snapshots = BufferSnapshots(copied._module)
        copied._changes_buffers = None if self._changes_buffers else self._changes_buffers
        return copied

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self._original is None:
            return getattr, (self._module, "forward")
        return operator.itemgetter(0), ((self._original,),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; with gradients enabled, autograd keeps its arguments only."""
        function = self.__wrapped__
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        args, kwargs = _without_caches(args, kwargs)
        names, positional = tuple(kwargs), len(args)

        def call(*values: Any) -> Any:
            return function(*values[:positional], **dict(zip(names, values[positional:], strict=True)))

        # All by position: torch restores the RNG of the devices of positional arguments only, and `checkpoint` has
        # keyword arguments with names that the forward may have too.
        values = (*args, *kwargs.values())
        if torch.compiler.is_compiling() and self._changes_buffers is False:
            return checkpoint(call, *values, use_reentrant=False)  # compiled code could not restore buffers
        return self._checkpoint(call, values)

    @never_compiled
    def _checkpoint(self, call: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        snapshot = self._snapshots.take()
        if not snapshot.copies:
            return checkpoint(call, *values, use_reentrant=False)
        outputs = checkpoint(call, *values, use_reentrant=False, context_fn=lambda: (nullcontext(), snapshot))
        self._changes_buffers = self._snapshots.learn(snapshot)
        return outputs


def _without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Remove key-value caches, to which the second run of an attention layer would append again.

    HuggingFace's models pass an empty cache to every layer, unless `use_cache=False`. Other caches are refused.
    """
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return args, kwargs
    if any(int(cache.get_seq_length()) for cache in caches):
        raise ActivationCheckpointingError(
            f"a module of `activation_checkpointing` was given a {type(caches[0]).__name__} that holds keys and values"
            f" of {int(caches[0].get_seq_length())} tokens, to which its forward pass in the backward pass would append"
            " again. Pass `use_cache=False` to the model while training."
        )
    kept = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if "use_cache" in kept:
        kept["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kept


def _is_cache(value: Any) -> bool:
    return not isinstance(value, Tensor) and hasattr(value, "get_seq_length") and hasattr(value, "update")

"""Activation checkpointing of the modules that a policy matches: their forward pass runs again in the backward pass."""

import copy
import inspect
import operator
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ddp_ext._compat.torch import Normalisation, TensorVersions, called_attribute, never_compiled, uncompiled
from lightning_ddp_ext.errors import ActivationCheckpointingError


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    """A buffer of a module before a forward pass, with a clone."""

    owner: nn.Module
    name: str
    tensor: Tensor
    clone: Tensor

    @property
    def key(self) -> tuple[int, str]:
        """The module and the name, for sets."""
        return id(self.owner), self.name


class BufferSnapshot:
    """Context of the second forward pass: buffers have the values from before the first one.

    Otherwise batch normalisation would update its running statistics twice per step, and spectral normalisation would
    compute something else than in the first forward pass.
    """

    def __init__(self, buffers: Sequence[_Buffer], uncounted: Set[tuple[int, str]]) -> None:
        self.buffers = buffers
        self._versions = TensorVersions([buffer.tensor for buffer in buffers])
        self._uncounted = uncounted
        self._current: list[tuple[nn.Module, dict[str, Tensor | None]]] = []

    def changed(self) -> list[_Buffer]:
        """Return the buffers that have changed, and the buffers whose changes torch does not count."""
        found = self._versions.changed([buffer.owner._buffers.get(buffer.name) for buffer in self.buffers])
        changed = {id(one.tensor) for n, one in enumerate(self.buffers) if n in found or one.key in self._uncounted}
        return [buffer for buffer in self.buffers if id(buffer.tensor) in changed]  # wherever it is shared

    def __enter__(self) -> None:
        changed = self.changed()
        owners = {id(buffer.owner): buffer.owner for buffer in changed}
        self._current = [(owner, dict(owner._buffers)) for owner in owners.values()]
        # Clone again, since `retain_graph=True` allows several backward passes. A shared buffer gets one clone.
        clones = {id(buffer.clone): buffer.clone.clone() for buffer in changed}
        for buffer in changed:
            buffer.owner._buffers[buffer.name] = clones[id(buffer.clone)]

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
        self._last = BufferSnapshot([], frozenset())
        self._uncounted: set[tuple[int, str]] = set()
        self._known_modes: set[tuple[bool, ...]] = set()

    def take(self) -> BufferSnapshot:
        """Take a snapshot."""
        changed = {id(buffer.tensor) for buffer in self._last.changed()}
        clones = {id(one.tensor): one.clone for one in self._last.buffers if id(one.tensor) not in changed}
        buffers = []
        for owner in self._module.modules():
            for name, tensor in owner._buffers.items():
                if isinstance(owner, Normalisation):
                    self._uncounted.add((id(owner), name))
                if tensor is not None:
                    if id(tensor) not in clones:
                        clones[id(tensor)] = tensor.detach().clone()
                    buffers.append(_Buffer(owner, name, tensor, clones[id(tensor)]))
        self._last = BufferSnapshot(buffers, self._uncounted)
        return self._last

    def learn(self, snapshot: BufferSnapshot) -> bool:
        """Compare buffers with the snapshot from before a forward pass; return True if a forward pass changes any."""
        modes = tuple(part.training for part in self._module.modules())
        if modes not in self._known_modes:
            self._known_modes.add(modes)
            changed = snapshot.changed()
            unchanged = [buffer for buffer in snapshot.buffers if buffer not in changed]
            self._uncounted.update(one.key for one in unchanged if not torch.equal(one.clone, one.tensor))
        return bool(snapshot.changed())


class CheckpointedForward:
    """Replaces the forward of one module instance, so that module names, state dict keys and classes do not change.

    The second run has the RNG state, the autocast state and the buffers of the first run; other state, such as a
    counter, changes twice. A deep copy checkpoints its own forward; a pickled module is an ordinary one again.
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
        if not snapshot.buffers:
            return checkpoint(call, *values, use_reentrant=False)
        outputs = checkpoint(call, *values, use_reentrant=False, context_fn=lambda: (nullcontext(), snapshot))
        self._changes_buffers = self._snapshots.learn(snapshot)
        return outputs


def _without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Remove the empty key-value caches that HuggingFace's models pass to every layer; refuse caches with content."""
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


_ModuleClass = type[nn.Module] | str
ActivationCheckpointingPolicy = _ModuleClass | Sequence[_ModuleClass] | Set[_ModuleClass] | Callable[[nn.Module], bool]

_REMEDY = "Use a class such as `nn.TransformerEncoderLayer`, its path as a string, a set of these, or a predicate."


class ActivationCheckpointing:
    """Checkpoints activations of the modules that a policy matches: their forward pass runs again in the backward pass.

    Only the outermost matching modules are checkpointed, never the root. A module that is compiled by itself runs its
    compiled code again. If code around the modules is compiled, they are part of it, unless they change buffers.
    """

    def __init__(self, policy: ActivationCheckpointingPolicy) -> None:
        self.policy = policy
        self.modules: dict[str, str] = {}  # class name of each checkpointed module
        self._matches = _predicate(policy)

    def __reduce__(self) -> tuple[Any, ...]:
        # For processes that are started with "spawn", because the predicate of a policy cannot be pickled.
        return ActivationCheckpointing, (self.policy,)

    @property
    def report(self) -> str:
        """Number of checkpointed modules of each class, as text."""
        counts = Counter(self.modules.values())
        return f"activation checkpointing: {', '.join(f'{count} {name}' for name, count in counts.most_common())}"

    def apply(self, module: nn.Module) -> None:
        """Checkpoint the matching modules below `module`; raise an ActivationCheckpointingError if there are none."""
        self.remove(module)
        found = dict(self._find(module, "", {id(module)}))
        if not found:
            raise ActivationCheckpointingError(
                f"`activation_checkpointing` names no module below {type(module).__name__}, which is never recomputed"
                f" as a whole; there are: {_classes_below(module)}. Name one of these classes."
            )
        self.modules = {name: type(uncompiled(child)).__name__ for name, child in found.items()}
        for child in found.values():
            CheckpointedForward(child).install()

    def remove(self, module: nn.Module) -> None:
        """Restore the modules below `module`, which may be a deep copy of the module given to `apply`."""
        for child in module.modules():
            checkpointed = CheckpointedForward.find(child)
            if checkpointed is not None:
                checkpointed.remove()

    def _find(self, module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
        """Find the outermost modules that the policy matches, each once."""
        for name, child in module.named_children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            # A module without `forward` is a container, which is never called.
            if _has_forward(child) and self._matches(uncompiled(child)):
                yield prefix + name, child
            else:
                yield from self._find(child, f"{prefix}{name}.", seen)


def _predicate(policy: Any) -> Callable[[nn.Module], bool]:
    if isinstance(policy, str):
        policy = _import(policy)
    policy = [policy] if isinstance(policy, type) else policy
    if isinstance(policy, Sequence | Set) and not isinstance(policy, nn.Module):
        return _class_predicate([_import(entry) if isinstance(entry, str) else entry for entry in policy])
    if isinstance(policy, nn.Module) or not callable(policy):
        raise TypeError(f"`activation_checkpointing` must name classes of modules, got {_shown(policy)}. {_REMEDY}")
    try:
        inspect.signature(policy).bind(nn.Identity())
    except TypeError as error:
        raise TypeError(
            f"`activation_checkpointing` must take one module, got {_shown(policy)}: {error}. {_REMEDY}"
        ) from error
    except ValueError:  # a function in C has no signature
        pass
    return cast(Callable[[nn.Module], bool], policy)


def _class_predicate(classes: Sequence[Any]) -> Callable[[nn.Module], bool]:
    if not classes:
        raise ValueError(f"`activation_checkpointing` is empty. {_REMEDY}")
    for entry in classes:
        if not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise TypeError(f"`activation_checkpointing` holds {_shown(entry)}, not a class of modules. {_REMEDY}")
    kinds = tuple(classes)
    return lambda module: isinstance(module, kinds)


def _import(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"`activation_checkpointing` names {path!r}, which cannot be imported: {error}. Write the path of a class,"
            ' such as "torch.nn.TransformerEncoderLayer".'
        ) from error


def _has_forward(module: nn.Module) -> bool:
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def _classes_below(module: nn.Module) -> str:
    counts = Counter(type(child).__name__ for child in module.modules() if child is not module and _has_forward(child))
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "none"


def _shown(value: Any) -> str:
    return f"the module {type(value).__name__}" if isinstance(value, nn.Module) else repr(value)

"""Activation checkpointing of the modules that a policy matches: their forward pass runs again in the backward pass."""

import copy
import inspect
import operator
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import nullcontext
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ddp_ext._compat.torch import Normalisation, called_attribute, never_compiled, uncompiled
from lightning_ddp_ext.errors import ActivationCheckpointingError

_Buffers = Sequence[tuple[nn.Module, dict[str, Tensor | None]]]  # of the parts of a module


class BufferSnapshot:
    """Context of the second forward pass: buffers have the values from before the first one.

    Otherwise batch normalisation would update its running statistics twice per step, and spectral normalisation would
    compute something else than in the first forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before = _clone([(part, part._buffers) for part in module.modules()])
        self._current: _Buffers = []

    def differs(self) -> bool:
        """Return True if the buffers have changed since then."""
        pairs = [(own.get(name), one) for part, own in self._before for name, one in part._buffers.items()]
        return any(one is not other and (one is None or other is None or not one.equal(other)) for one, other in pairs)

    def __enter__(self) -> None:
        self._current = [(part, dict(part._buffers)) for part, _ in self._before]
        _set(_clone(self._before))  # again, since `retain_graph=True` allows several backward passes

    def __exit__(self, *exception: object) -> None:
        _set(self._current)
        self._current = []


def _clone(buffers: _Buffers) -> _Buffers:
    """Clone buffers; one that several modules share stays shared."""
    clones = {id(one): one.detach().clone() for _, own in buffers for one in own.values() if one is not None}
    return [(part, {name: clones.get(id(one)) for name, one in own.items()}) for part, own in buffers]


def _set(buffers: _Buffers) -> None:
    for part, own in buffers:
        part._buffers.clear()
        part._buffers.update(own)


class CheckpointedForward:
    """Replaces the forward of one module instance, so that module names, state dict keys and classes do not change.

    The second run has the RNG state, the autocast state and the buffers of the first run; other state, such as a
    counter, changes twice. A deep copy checkpoints its own forward; a pickled module is an ordinary one again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attribute = called_attribute(module)
        self._original: Callable[..., Any] | None = module.__dict__.get(self._attribute)
        # Whether the forward pass changes buffers; None until the first call of a module with buffers has shown it.
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
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
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
        if not any(part._buffers for part in self._module.modules()):
            return checkpoint(call, *values, use_reentrant=False)
        snapshot = BufferSnapshot(self._module)
        outputs = checkpoint(call, *values, use_reentrant=False, context_fn=lambda: (nullcontext(), snapshot))
        if self._changes_buffers is None:  # running statistics may change in training only
            has_statistics = any(isinstance(part, Normalisation) for part in self._module.modules())
            self._changes_buffers = has_statistics or snapshot.differs()
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

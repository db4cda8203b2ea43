"""Activation checkpointing of the modules that a policy matches."""

import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, cast

from torch import nn

from lightning_ddp_ext._compat.torch import uncompiled
from lightning_ddp_ext.activation_checkpointing.checkpointed_forward import CheckpointedForward
from lightning_ddp_ext.errors import ActivationCheckpointingError

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

    def __getstate__(self) -> dict[str, Any]:
        # For processes that are started with "spawn", because the predicate of a policy cannot be pickled.
        return {"policy": self.policy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["policy"])  # type: ignore[misc]

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

"""Activation checkpointing of the parts of a module that a policy names."""

import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_ddp_ext._compat.torch import uncompiled
from lightning_ddp_ext.activation_checkpointing.memory import ActivationMemory, MemoryMeter
from lightning_ddp_ext.activation_checkpointing.recomputed_module import Segment
from lightning_ddp_ext.errors import ActivationCheckpointingError

_ModuleClass = type[nn.Module] | str
ActivationCheckpointingPolicy = _ModuleClass | Sequence[_ModuleClass] | Set[_ModuleClass] | Callable[[nn.Module], bool]

_REMEDY = "Use a class such as `nn.TransformerEncoderLayer`, its path as a string, a set of these, or a predicate."


@dataclass(frozen=True, slots=True)
class ActivationCheckpointingReport:
    """What is recomputed, and what that saves in this process.

    Attributes:
        segments: Name of the class of each recomputed module, by the name of the module.
        memory: What was measured in the first forward pass with a backward pass; None before it, and if all segments
            run inside of code that was compiled as a whole.
    """

    segments: dict[str, str]
    memory: ActivationMemory | None

    def __str__(self) -> str:
        counts = Counter(self.segments.values())
        classes = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        made = f"activation checkpointing: {classes} recomputed in the backward pass"
        if self.memory is None:
            return f"{made}; memory not measured"
        saved = f"{_mebibytes(self.memory.saved)} saved" if self.memory.saved >= 0 else "nothing saved"
        return (
            f"{made}; {saved}: {_mebibytes(self.memory.kept)} of activations kept for it instead of"
            f" {_mebibytes(self.memory.without)}"
        )


class ActivationCheckpointing:
    """Makes modules recompute their forward pass in the backward pass instead of keeping its activations.

    Only the outermost modules that a policy names become segments, never the root. Names of modules, keys of state
    dicts and classes stay what they are; `Segment` tells what a recomputed forward pass sees and does.

    A module compiled by itself is recomputed as the compiled code it is. If code around the segments is compiled, they
    are part of it, and not measured; except for those that change buffers, which run without compilation.

    Args:
        policy: A class of modules, its path such as `"torch.nn.TransformerEncoderLayer"`, several of these in a list,
            tuple or set, or a predicate that tells for a module whether to recompute it.

    Raises:
        TypeError: If the policy is none of these.
        ValueError: If it is empty, or a path cannot be imported.

    Example:
        >>> import torch
        >>> model = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2) for _ in range(3)])
        >>> checkpointing = ActivationCheckpointing(nn.TransformerEncoderLayer)
        >>> checkpointing.apply(model)
        >>> model(torch.rand(5, 1, 8)).sum().backward()
        >>> sorted(checkpointing.report.segments), checkpointing.report.memory.saved > 0
        (['0', '1', '2'], True)
    """

    def __init__(self, policy: ActivationCheckpointingPolicy) -> None:
        self.policy = policy
        self._matches = _predicate(policy)
        self._segments: dict[str, str] = {}
        self._meter: MemoryMeter | None = None

    def __getstate__(self) -> dict[str, Any]:
        # For processes that are started with "spawn": a predicate of a policy cannot be pickled.
        return {"policy": self.policy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["policy"])  # type: ignore[misc]

    @property
    def report(self) -> ActivationCheckpointingReport:
        """What is recomputed; with what it saves, once a backward pass has begun."""
        return ActivationCheckpointingReport(dict(self._segments), None if self._meter is None else self._meter.memory)

    def apply(self, module: nn.Module) -> None:
        """Let the modules below `module` that the policy names recompute their forward pass.

        A module that recomputes already begins anew, so that every run measures its own first batch.

        Args:
            module: The root, which is never recomputed as a whole.

        Raises:
            ActivationCheckpointingError: If the policy names no module.
            TypeError: If a predicate returns something else than True or False.
        """
        self.remove(module)
        found = dict(self._find(module, "", {id(module)}))
        if not found:
            raise ActivationCheckpointingError(
                f"`activation_checkpointing` names no module below {type(module).__name__}, which is never recomputed"
                f" as a whole; there are: {_classes_below(module)}. Name one of these classes."
            )
        self._meter = MemoryMeter(module)
        self._segments = {name: type(uncompiled(child)).__name__ for name, child in found.items()}
        for child in found.values():
            Segment(child, self._meter).install()

    def remove(self, module: nn.Module) -> None:
        """Leave the modules below `module` as they were before `apply`; those of a deep copy as well."""
        for child in module.modules():
            segment = Segment.find(child)
            if segment is not None:
                segment.remove()

    def _find(self, module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
        """Find the outermost modules that the policy names, each once."""
        for name, child in module.named_children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            # What `torch.compile` wraps is recomputed from outside. Containers are never called.
            if _has_forward(child) and self._matches(uncompiled(child)):
                yield prefix + name, child
            else:
                yield from self._find(child, f"{prefix}{name}.", seen)


def _predicate(policy: Any) -> Callable[[nn.Module], bool]:
    if isinstance(policy, str):
        policy = _import(policy)
    if isinstance(policy, Sequence | Set) and not isinstance(policy, nn.Module):
        if not policy:
            raise ValueError(f"`activation_checkpointing` is empty. {_REMEDY}")
        return _class_predicate([_import(entry) if isinstance(entry, str) else entry for entry in policy])
    if isinstance(policy, type):
        return _class_predicate([policy])
    if isinstance(policy, nn.Module) or not callable(policy):
        raise TypeError(f"`activation_checkpointing` must name classes of modules, got {_shown(policy)}. {_REMEDY}")
    return _checked(policy)


def _class_predicate(classes: Iterable[Any]) -> Callable[[nn.Module], bool]:
    for entry in classes:
        if not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise TypeError(f"`activation_checkpointing` holds {_shown(entry)}, not a class of modules. {_REMEDY}")
    kinds = tuple(classes)
    return lambda module: isinstance(module, kinds)


def _checked(predicate: Callable[[nn.Module], Any]) -> Callable[[nn.Module], bool]:
    try:
        inspect.signature(predicate).bind(nn.Module())
    except TypeError as error:
        raise TypeError(
            f"`activation_checkpointing` must be a predicate of one module, but {_shown(predicate)} cannot be called"
            f" with one: {error}. {_REMEDY}"
        ) from error

    def matches(module: nn.Module) -> bool:
        answer = predicate(module)
        if not isinstance(answer, bool):
            raise TypeError(
                f"the predicate `activation_checkpointing` returned {_shown(answer)} for a {type(module).__name__}."
                " Return True or False."
            )
        return answer

    return matches


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


def _mebibytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"

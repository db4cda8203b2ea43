"""Compare the settings and modules of the ranks at the start, and select the parameters that ranks share."""

import functools
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence, Set
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ddp_ext._compat.torch import ignored_by_ddp
from lightning_ddp_ext.consistency.fingerprints import describe
from lightning_ddp_ext.distributed.exchange import gather_different, list_ranks
from lightning_ddp_ext.errors import ReplicaMismatchError, UnsupportedFeatureError

_NAMED = 3  # differences in a message
_REMEDIES = {
    "version": "Use the same versions on every rank.",
    "argument": "Give the strategy the same arguments on every rank.",
    "parameter": "Build the same module on every rank, with the same parameters frozen.",
    "buffer": "Build the same module on every rank, and change it in the same steps. Exclude a buffer that holds other"
    " values on each rank with `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`.",
    "order": "Create and register them in the same order on every rank.",
}


def compare_setups(description: Mapping[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Raise an error unless all ranks give the same description. Call on every rank of the group.

    Equal descriptions cost one collective of 8 bytes per rank.

    Args:
        description: Values by name, see `describe_versions` and `describe_module`. Values are compared as text, objects
            and functions by their qualified name. The order of names has to be equal too.
        group: The ranks to compare; None for all.

    Raises:
        ReplicaMismatchError: On every rank, with the first three differences and their values on each rank.
    """
    own = {key: _to_text(value) for key, value in description.items()}
    if dist.get_world_size(group) == 1:
        return
    records = gather_different(own, group)
    if len(records) == 1:
        return
    differences = _compare_records(records, dist.get_process_group_ranks(group or dist.group.WORLD))
    more = f"; and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
    remedy = _REMEDIES.get(differences[0].split(" ")[0], "Make it equal on every rank.")
    raise ReplicaMismatchError(f"ranks are not set up alike: {'; '.join(differences[:_NAMED])}{more}. {remedy}")


def _compare_records(records: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    """Describe the values of each rank for every difference."""
    keys = dict.fromkeys(key for record in records for key in record)
    by_key = {key: [record.get(key, "missing") for record in records] for key in keys}
    differing = [_compare(key, values, ranks) for key, values in by_key.items() if len(set(values)) > 1]
    if differing:
        return differing
    orders = zip(*(list(record) for record in records), strict=True)
    at, entries = next((at, entries) for at, entries in enumerate(orders) if len(set(entries)) > 1)
    return [_compare(f"order of entries, of which number {at}", entries, ranks)]


def _compare(name: str, values: Sequence[str], ranks: Sequence[int]) -> str:
    by_value: dict[str, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        by_value.setdefault(value, []).append(rank)
    found = [f"{value} on {list_ranks(own)}" for value, own in by_value.items()]
    return f"{name} is {found[0]} but {', '.join(found[1:])}"


def describe_arguments(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return a description of resolved arguments for `compare_setups`."""
    return {f"argument `{name}`": value for name, value in arguments.items()}


def describe_module(module: nn.Module) -> dict[str, object]:
    """Describe the parameters and buffers of a module, except for the names that DDP ignores.

    Args:
        module: The module.

    Returns:
        For `compare_setups`: shapes and dtypes by name, and which parameters are frozen or the same object.
    """
    description: dict[str, object] = {}
    seen: dict[int, str] = {}
    ignored = find_ignored(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in ignored:
            continue
        first = seen.setdefault(id(parameter), name)
        trained = "trained" if parameter.requires_grad else "frozen"
        shared = "" if first == name else f", the same as `{first}`"
        description[f"parameter `{name}`"] = f"{describe(parameter)} {trained}{shared}"
    for name, buffer in module.named_buffers():
        if name not in ignored:
            description[f"buffer `{name}`"] = describe(buffer)
    return description


def _to_text(value: Any) -> str:
    """Return text without addresses and without the order of a set, which depend on the process."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | int | float | timedelta | Enum | torch.dtype):
        return str(value)
    if isinstance(value, functools.partial):
        return f"partial({', '.join(_to_text(part) for part in (value.func, value.args, value.keywords))})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_to_text(key)}: {_to_text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(map(_to_text, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_to_text, value)) + "]"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def find_ignored(module: nn.Module) -> frozenset[str]:
    """Return the names of parameters and buffers that each rank has for itself (`ignored_by_ddp`), such as queues."""
    return frozenset(
        f"{prefix}.{name.strip('.')}".strip(".")
        for prefix, part in module.named_modules()
        for name in ignored_by_ddp(part)
    )


def shared_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the shared parameters that can have gradients, frozen ones too, each once."""
    for name, buffer in module.named_buffers():
        _refuse_lazy("buffer", name, buffer)
    return [parameter for parameter in _not_ignored(module) if _has_gradient(parameter)]


def fixed_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the shared parameters that cannot have gradients, such as integers, each once."""
    return [parameter for parameter in _not_ignored(module) if not _has_gradient(parameter)]


def _not_ignored(module: nn.Module) -> list[nn.Parameter]:
    ignored = find_ignored(module)
    found: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in ignored:
            _refuse_lazy("parameter", name, parameter)
            found[id(parameter)] = parameter
    return list(found.values())


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _refuse_lazy(kind: str, name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise UnsupportedFeatureError(
            f"{kind} `{name}` has no shape yet. Run a batch through the module before its gradients are reduced."
        )


def describe_versions(*packages: str) -> dict[str, object]:
    """Describe the versions of Python, without its last number, of torch, of this package, and of other distributions.

    Args:
        packages: Names of the other distributions.

    Returns:
        A description for `compare_setups`.
    """
    return {
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        "version of torch": torch.__version__,  # may differ from the installed one in a source build
        **{f"version of {package}": _installed(package) for package in (*packages, "lightning-ddp-ext")},
    }


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

"""Which parameters and buffers ranks share, and which belong to a rank alone."""

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
from lightning_ddp_ext.consistency.replica_differences import union_of_keys
from lightning_ddp_ext.distributed.exchange import gather_different, list_ranks
from lightning_ddp_ext.errors import ReplicaMismatchError, UnsupportedFeatureError

_NAMED = 3  # keys in a message
_REMEDIES = {
    "version": "Install the same versions on every host.",
    "argument": "Give the strategy the same arguments on every rank.",
    "parameter": "Build the same module on every rank, with the same parameters frozen.",
    "buffer": "Build the same module on every rank, and change it in the same steps. A buffer of a rank's own values"
    " can be left out with `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`.",
    "order": "Create and register them in the same order on every rank.",
}


def compare_setups(description: Mapping[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Raise an error unless all ranks give the same description; every rank of the group has to call it.

    While all are the same, it costs one collective of 8 bytes per rank.

    Args:
        description: What has to be equal, by name: see `describe_versions`, `describe_arguments` and `describe_module`.
            Values are compared as text; of objects and functions it is the qualified name. The order of names counts,
            since that of parameters is often the order in which gradients travel.
        group: The ranks to compare; None for all.

    Raises:
        ReplicaMismatchError: On every rank, if any differ; it names the first three that do, with what each rank has.
    """
    own = {key: _to_text(value) for key, value in description.items()}
    if dist.get_world_size(group) == 1:
        return
    records = gather_different(own, group)
    if len(records) == 1:
        return
    differences = _compare_records(records, dist.get_process_group_ranks(group))
    more = f"; and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
    remedy = _REMEDIES.get(differences[0].split(" ")[0], "Make it equal on every rank.")
    raise ReplicaMismatchError(f"ranks are not set up alike: {'; '.join(differences[:_NAMED])}{more}. {remedy}")


def _compare_records(records: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    """Say for everything that differs what each rank has."""
    keys = union_of_keys(records)
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
    """Describe arguments.

    Args:
        arguments: The arguments by name, as resolved: not `None` where that stands for a value that is found later.

    Returns:
        A description for `compare_setups`.
    """
    return {f"argument `{name}`": value for name, value in arguments.items()}


def describe_module(module: nn.Module) -> dict[str, object]:
    """Describe the parameters and buffers of a module: names, shapes, dtypes, what is frozen, what is shared.

    Those that belong to a rank alone are left out, see `find_ignored`.

    Args:
        module: The module.

    Returns:
        A description for `compare_setups`.
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
    """Return text that does not depend on the process: no addresses, no order of a set."""
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
    """Find the parameters and buffers that ranks do not share, such as queues that hold a rank's own values.

    They are those given to torch's `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`, for the
    module or for one below it.

    Args:
        module: The module.

    Returns:
        Their names, as the module names them.
    """
    return frozenset(
        f"{prefix}.{name.strip('.')}".strip(".")
        for prefix, part in module.named_modules()
        for name in ignored_by_ddp(part)
    )


def shared_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have gradients to be shared, frozen ones too, each once.

    Raises:
        UnsupportedFeatureError: If one is not initialised yet.
    """
    for name, buffer in module.named_buffers():
        _refuse_lazy("buffer", name, buffer)
    return [parameter for parameter in _not_ignored(module) if _has_gradient(parameter)]


def fixed_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that ranks share and that have no gradients, such as whole numbers, each once."""
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


_PACKAGES = ("torch", "lightning", "lightning-ddp-ext")


def describe_versions(packages: Sequence[str] = _PACKAGES) -> dict[str, object]:
    """Describe the versions of Python, without its last number, and of packages.

    Args:
        packages: Names of distributions.

    Returns:
        A description for `compare_setups`.
    """
    versions: dict[str, object] = {"version of Python": ".".join(platform.python_version_tuple()[:2])}
    for package in packages:
        # The version that runs may differ from the installed one in a source build.
        versions[f"version of {package}"] = torch.__version__ if package == "torch" else _installed(package)
    return versions


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

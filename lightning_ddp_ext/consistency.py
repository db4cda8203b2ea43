"""Comparison of settings, modules and training state between ranks, bit by bit."""

import functools
import hashlib
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from fnmatch import fnmatchcase
from numbers import Number
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_ddp_ext._compat.torch import checksums, equal_or_nan, find_ignored, read_all
from lightning_ddp_ext.distributed.exchange import (
    exchange_device,
    gather_different,
    gather_integer,
    gather_objects,
    list_ranks,
)
from lightning_ddp_ext.errors import ReplicaMismatchError, UnsupportedFeatureError


def fingerprint(tensor: Tensor) -> int:
    """Return a signed 64-bit integer that depends on every bit of a tensor, its dtype and its shape.

    Strides, the device and `requires_grad` are ignored. Every change of one element of up to 32 bits is detected; other
    changes are missed with a probability of about 2^-32. Another device copies a few bytes to the host.
    """
    return fingerprint_all({"": tensor})


def fingerprint_all(tensors: Mapping[str, Tensor]) -> int:
    """Return one fingerprint of many tensors, their names and order."""
    parts = {name: _dense_parts(tensor) for name, tensor in tensors.items()}
    forms = [(name, describe(tensors[name]), [tuple(one.shape) for one in own]) for name, own in parts.items()]
    text = repr((forms, read_all(checksums([part for own in parts.values() for part in own]))))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def describe(tensor: Tensor) -> str:
    """Return the dtype and shape of a tensor in words, such as `"float32 [7, 5]"`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if is_lazy(tensor):
        return f"{dtype}, uninitialized"
    if tensor.is_nested:
        return f"{dtype} nested [{tensor.size(0)}, ...]"
    layout = "" if tensor.layout == torch.strided else str(tensor.layout).removeprefix("torch.") + " "
    return f"{dtype} {layout}{list(tensor.shape)}"


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a tensor consists of."""
    if is_lazy(tensor) or tensor.is_meta:
        return []
    if tensor.is_nested:
        return list(tensor.detach().unbind())
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor if tensor.layout == torch.strided else tensor.to_dense()]


_NAMED = 3  # differences in a message
_MOST_LISTED = 64  # elements of a tensor; of a larger one, the fingerprint is compared
_REMEDIES = {
    "version": "Use the same versions on every rank.",
    "argument": "Give the strategy the same arguments on every rank.",
    "parameter": "Build the same module on every rank, with the same parameters frozen.",
    "buffer": "Build the same module on every rank, and change it in the same steps. Exclude a buffer that holds other"
    " values on each rank with `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`.",
    "setting": "Change it alike on all ranks, such as by monitoring values that are logged with `sync_dist=True`.",
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
    own = {key: value_to_text(value) for key, value in description.items()}
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
    differing = [_describe_values(key, values, ranks) for key, values in by_key.items() if len(set(values)) > 1]
    if differing:
        return differing
    orders = zip(*(list(record) for record in records), strict=True)
    at, entries = next((at, entries) for at, entries in enumerate(orders) if len(set(entries)) > 1)
    return [_describe_values(f"order of entries, of which number {at}", entries, ranks)]


def _describe_values(name: str, values: Sequence[str], ranks: Sequence[int]) -> str:
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


def value_to_text(value: Any, reads_devices: bool = True) -> str:
    """Return text without addresses and without the order of a set, which depend on the process.

    Without `reads_devices`, the host does not wait for devices, and tensors on them are described by type and shape.
    """
    if isinstance(value, Tensor):
        if value.device.type != "cpu" and not reads_devices:
            return describe(value)
        if value.layout != torch.strided or value.numel() > _MOST_LISTED:
            return f"{describe(value)} with fingerprint {fingerprint(value):x}"
    if isinstance(value, Tensor | numpy.ndarray | numpy.generic):
        value = value.tolist()
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, Number | timedelta | Enum | torch.dtype):
        return str(value)
    text = functools.partial(value_to_text, reads_devices=reads_devices)
    if isinstance(value, functools.partial):
        return f"partial({', '.join(map(text, (value.func, value.args, value.keywords)))})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{text(key)}: {text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(map(text, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(text, value)) + "]"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


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


_MISSING = "missing"


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """The first tensor that is not the same on every rank, and a sentence without a full stop that describes it."""

    name: str
    text: str


def find_difference(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> ReplicaDifference | None:
    """Return the first bitwise difference between the tensors of all ranks, or None; call it on every rank."""
    if dist.get_world_size(group) == 1 or len(set(gather_integer(fingerprint_all(tensors), group))) == 1:
        return None
    own = {name: (describe(tensor), fingerprint(tensor)) for name, tensor in tensors.items()}
    records = gather_objects(own, group)  # on all ranks, since all have seen that the numbers differ
    names = list(dict.fromkeys(name for record in records for name in record))
    differing = [name for name in names if len({record.get(name) for record in records}) > 1]
    if not differing:  # the same tensors in another order
        return None
    name = differing[0]
    entries = [record.get(name, (_MISSING, 0)) for record in records]
    common, _ = Counter(entries).most_common(1)[0]  # the first of several
    majority = [i for i, entry in enumerate(entries) if entry == common]
    others = [i for i, entry in enumerate(entries) if entry != common]
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    rest = list_ranks([ranks[i] for i in majority])
    expected = entries[majority[0]][0]
    if any(kind != expected for kind, _ in entries):  # on every rank, since all have the same records
        kinds = ", ".join(f"{entries[i][0]} on rank {ranks[i]}" for i in others)
        text = f"{name} is {kinds}, but {expected} on {rest}"
    else:
        deviation = _measure_difference(tensors[name], majority[0], others[0], group)
        text = f"{name}, {expected}, of {list_ranks([ranks[i] for i in others])} differs from {rest}{deviation}"
    return ReplicaDifference(name, f"{text} ({len(differing)} of {len(names)} tensors differ)")


@torch.no_grad()
def _measure_difference(tensor: Tensor, source: int, other: int, group: dist.ProcessGroup | None) -> str:
    """Describe how far the tensor of one rank is from the tensor of another rank."""
    if tensor.is_nested or tensor.is_meta or is_lazy(tensor):
        return ""
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    own = dense.resolve_conj().resolve_neg().to(exchange_device(group)).contiguous().view(-1)
    reference = own.clone()
    dist.broadcast(reference.view(torch.uint8), group=group, group_src=source)  # bytes: gloo lacks some dtypes
    differs = ~equal_or_nan(own, reference)
    precise = torch.complex128 if own.is_complex() else torch.float64
    values, expected = (one[differs].cpu().to(precise) for one in (own, reference))  # not every device has float64
    largest = float((values - expected).abs().max()) if len(values) else 0.0  # such as nan with other bits
    return f" by up to {gather_objects(largest, group)[other]:.3g}"


def name_training_state(
    module: nn.Module, optimizers: Sequence[Optimizer] = (), *, buffers: bool = True, ignore: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Return parameters, buffers, and the state and settings of optimizers by readable names, for `find_difference`.

    Tensors are not copied. Names that DDP ignores or a pattern in `ignore` matches are skipped.
    """
    ignored = find_ignored(module)

    def is_compared(name: str) -> bool:
        return name not in ignored and not any(fnmatchcase(name, pattern) for pattern in ignore)

    state: dict[str, Tensor] = {
        f"parameter `{name}`": one for name, one in module.named_parameters() if is_compared(name)
    }
    if buffers:
        state |= {f"buffer `{name}`": one for name, one in module.named_buffers() if is_compared(name)}
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for path, owner, value in _entries_of(optimizer, names):
            if owner is None or is_compared(owner):
                state[f"{path} in optimizer {number}"] = value
    return state


def hash_training_state(module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> str:
    """Return the SHA-256 of parameters, buffers, and the state and settings of optimizers, in hexadecimal digits."""
    found = hashlib.sha256()
    for name, tensor in name_training_state(module, optimizers).items():
        found.update(f"{name} {describe(tensor)}".encode())
        for part in _dense_parts(tensor.detach()):
            flat = part.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            found.update(flat.cpu().numpy().tobytes())
    return found.hexdigest()


def _entries_of(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[str, str | None, Tensor]]:
    """Yield the path, the parameter's name if any, and the value of each entry of an optimizer."""
    for number, group in enumerate(optimizer.param_groups):
        for key, value in _flatten({key: value for key, value in group.items() if key != "params"}):
            yield f"`{key}` of group {number}", None, value
        for position, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"parameter {position} of group {number}")
            # `state` is a defaultdict: indexing would add an entry.
            for key, value in _flatten(optimizer.state.get(parameter, {})):
                yield f"`{key}` of `{name}`", name, value


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and numbers in nested containers; other objects have no bits to compare."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Number):
        precise = torch.complex128 if isinstance(value, complex) else torch.float64
        yield path, torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else precise)
    elif isinstance(value, Mapping):
        # Sorted: a loaded state may have its keys in another order.
        for key in sorted(value, key=str):
            yield from _flatten(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for position, entry in enumerate(value):
            yield from _flatten(entry, f"{path}[{position}]")

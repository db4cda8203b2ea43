"""Compare the tensors of all ranks bit by bit, and describe the first difference."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_ddp_ext.consistency.fingerprints import describe, fingerprint, fingerprint_all
from lightning_ddp_ext.consistency.setups import find_ignored
from lightning_ddp_ext.distributed.exchange import exchange_device, gather_integer, gather_objects, list_ranks

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
    records = gather_objects(own, group)
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
        deviation = _measure(tensors[name], majority[0], others[0], group)
        text = f"{name}, {expected}, of {list_ranks([ranks[i] for i in others])} differs from {rest}{deviation}"
    return ReplicaDifference(name, f"{text} ({len(differing)} of {len(names)} tensors differ)")


@torch.no_grad()
def _measure(tensor: Tensor, source: int, other: int, group: dist.ProcessGroup | None) -> str:
    """Describe how the tensor of one rank differs from the tensor of another rank."""
    if tensor.is_nested or tensor.is_meta or is_lazy(tensor):
        return ""
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    own = dense.resolve_conj().resolve_neg().to(exchange_device(group)).contiguous().view(-1)
    reference = own.clone()
    dist.broadcast(reference.view(torch.uint8), group=group, group_src=source)  # bytes: gloo lacks some dtypes
    is_other = dist.get_rank(group) == other
    text = _compare(own.cpu(), reference.cpu(), dense.shape) if is_other else ""  # not every device has float64
    return str(gather_objects(text, group)[other])


def _compare(own: Tensor, reference: Tensor, shape: torch.Size) -> str:
    size = own.element_size()
    bits, bits_of_reference = own.view(torch.uint8).view(-1, size), reference.view(torch.uint8).view(-1, size)
    positions = (bits != bits_of_reference).any(1).nonzero().view(-1)
    number = positions.numel()
    if not number:  # sparse tensors with the same dense values
        return ""
    first = int(positions[0])
    place = f" at {[int(i) for i in torch.unravel_index(positions[0], shape)]}" if shape else ""
    precise = torch.complex128 if own.is_complex() else torch.float64
    values, expected = own[positions].to(precise), reference[positions].to(precise)
    absolute = float((values - expected).abs().max())
    relative = absolute / float(torch.maximum(values.abs(), expected.abs()).max()) if absolute else 0.0
    texts = _to_text(own[first]), _to_text(reference[first])
    if texts[0] == texts[1]:
        texts = f"{texts[0]} ({_to_hex(bits[first])})", f"{texts[1]} ({_to_hex(bits_of_reference[first])})"
    return (
        f": {number} element{'s differ' if number > 1 else ' differs'}, first{place} {texts[0]} instead of {texts[1]},"
        f" by up to {absolute:.3g} (relative {relative:.3g})"
    )


def _to_text(element: Tensor) -> str:
    value = element.item()
    if isinstance(value, bool | int):
        return str(value)
    return f"{value:.17g}" if element.element_size() >= 8 and not element.is_complex() else f"{value:.9g}"


def _to_hex(element: Tensor) -> str:
    return "0x" + bytes(reversed(element.tolist())).hex()


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

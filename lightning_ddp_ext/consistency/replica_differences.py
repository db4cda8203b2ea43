"""Whether tensors are the same on every rank, and if not, which, where and by how much."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_ddp_ext.consistency.fingerprints import describe, fingerprint, fingerprint_all
from lightning_ddp_ext.distributed.exchange import exchange_device, gather_integer, gather_objects, list_ranks

_MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Deviation:
    """By how much two tensors of the same shape and dtype differ.

    Attributes:
        elements: How many elements differ in any bit.
        index: Index of the first of them.
        values: That element, and what it should have been, as text.
        absolute: The largest difference of two elements, computed in float64.
        relative: The same, divided by the largest magnitude among the elements that differ.
    """

    elements: int
    index: tuple[int, ...]
    values: tuple[str, str]
    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """The first tensor that is not the same on every rank.

    Attributes:
        name: The tensor.
        ranks: The ranks that differ from the majority; from the majority with the lowest rank if there are several.
        majority: The ranks of the majority.
        kinds: What each rank of the group has: dtype and shape, or `"missing"`.
        deviations: By how much each of `ranks` differs; none where shapes or dtypes differ, or a tensor is missing.
        differing: How many tensors differ.
        compared: How many tensors there are, over all ranks.
    """

    name: str
    ranks: tuple[int, ...]
    majority: tuple[int, ...]
    kinds: Mapping[int, str]
    deviations: Mapping[int, Deviation]
    differing: int
    compared: int

    def __str__(self) -> str:
        """Describe the difference in a sentence without a full stop."""
        differing, rest = list_ranks(self.ranks), list_ranks(self.majority)
        counted = f"({self.differing} of {self.compared} tensors differ)"
        expected = self.kinds[self.majority[0]]
        if any(self.kinds[rank] != expected for rank in self.ranks):
            kinds = ", ".join(f"{self.kinds[rank]} on rank {rank}" for rank in self.ranks)
            return f"{self.name} is {kinds}, but {expected} on {rest} {counted}"
        text = f"{self.name}, {expected}, of {differing} is not that of {rest}"
        if self.deviations:
            text += f": {_describe_deviations(self.deviations)}"
        return f"{text} {counted}"


def find_difference(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> ReplicaDifference | None:
    """Compare the tensors of all ranks, bit by bit; every rank of the group has to call it.

    While all are the same, it costs reading them once and one collective of 8 bytes per rank. Only otherwise are
    fingerprints of single tensors gathered, and the first tensor that differs is sent once.

    Args:
        tensors: The tensors by name. Ranks may have different names: what a rank lacks is a difference.
        group: The ranks to compare; None for all.

    Returns:
        The first difference in the order of the lowest rank's names; None if there is none. The same on every rank.
    """
    if dist.get_world_size(group) == 1 or len(set(gather_integer(fingerprint_all(tensors), group))) == 1:
        return None
    own = {name: (describe(tensor), fingerprint(tensor)) for name, tensor in tensors.items()}
    gathered = gather_objects(own, group)
    records = [{name: tuple(entry) for name, entry in record.items()} for record in gathered]
    names = union_of_keys(records)
    differing = [name for name in names if len({record.get(name) for record in records}) > 1]
    if not differing:  # the same tensors in another order
        return None
    entries = [record.get(differing[0], (_MISSING, 0)) for record in records]
    kinds = [kind for kind, _ in entries]
    majority, others = split_by_majority(entries)
    # All ranks decide this alike, since all have the same records.
    same_kind = len(set(kinds)) == 1
    deviations = _measure(tensors[differing[0]], majority[0], others, group) if same_kind else {}
    ranks = dist.get_process_group_ranks(group)
    return ReplicaDifference(
        name=differing[0],
        ranks=tuple(ranks[i] for i in others),
        majority=tuple(ranks[i] for i in majority),
        kinds={ranks[i]: kind for i, kind in enumerate(kinds)},
        deviations={ranks[i]: deviation for i, deviation in deviations.items()},
        differing=len(differing),
        compared=len(names),
    )


def union_of_keys(records: Iterable[Mapping[str, object]]) -> list[str]:
    """Return all keys once, those of the first record first, in its order."""
    return list(dict.fromkeys(key for record in records for key in record))


def split_by_majority(values: Sequence[object]) -> tuple[list[int], list[int]]:
    """Return the positions of the most frequent value, of the first such if there are several, and all others."""
    common, _ = Counter(values).most_common(1)[0]
    positions = range(len(values))
    return [i for i in positions if values[i] == common], [i for i in positions if values[i] != common]


@torch.no_grad()
def _measure(
    tensor: Tensor, source: int, others: Sequence[int], group: dist.ProcessGroup | None
) -> dict[int, Deviation]:
    """Send the tensor of one rank to all and measure how far those of some others are from it."""
    if tensor.is_nested or tensor.is_meta or is_lazy(tensor):
        return {}
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    own = dense.resolve_conj().resolve_neg().to(exchange_device(group)).contiguous().view(-1)
    reference = own.clone()
    dist.broadcast(reference.view(torch.uint8), group=group, group_src=source)  # bytes: gloo lacks some dtypes
    measured = None
    if dist.get_rank(group) in others:
        measured = _compare(own, reference, dense.shape)
    gathered = gather_objects(None if measured is None else dataclasses.asdict(measured), group)
    return {position: _read_deviation(entry) for position, entry in enumerate(gathered) if entry is not None}


def _read_deviation(entry: dict[str, Any]) -> Deviation:
    return Deviation(**{**entry, "index": tuple(entry["index"]), "values": tuple(entry["values"])})


def _compare(own: Tensor, reference: Tensor, shape: torch.Size) -> Deviation | None:
    size = own.element_size()
    bits, bits_of_reference = own.view(torch.uint8).view(-1, size), reference.view(torch.uint8).view(-1, size)
    positions = (bits != bits_of_reference).any(1).nonzero().view(-1)
    if not positions.numel():  # sparse tensors with the same values at other places
        return None
    first = int(positions[0])
    index = tuple(int(i) for i in torch.unravel_index(positions[0], shape)) if shape else ()
    precise = torch.complex128 if own.is_complex() else torch.float64
    values, expected = own[positions].to(precise), reference[positions].to(precise)
    absolute = float((values - expected).abs().max())
    magnitude = float(torch.maximum(values.abs(), expected.abs()).max())
    texts = _to_text(own[first]), _to_text(reference[first])
    if texts[0] == texts[1]:
        texts = f"{texts[0]} ({_to_hex(bits[first])})", f"{texts[1]} ({_to_hex(bits_of_reference[first])})"
    return Deviation(
        elements=positions.numel(),
        index=index,
        values=texts,
        absolute=absolute,
        relative=absolute / magnitude if absolute else 0.0,
    )


def _to_text(element: Tensor) -> str:
    value = element.item()
    if isinstance(value, bool | int):
        return str(value)
    return f"{value:.17g}" if element.element_size() >= 8 and not element.is_complex() else f"{value:.9g}"


def _to_hex(element: Tensor) -> str:
    return "0x" + bytes(reversed(element.tolist())).hex()


def _describe_deviations(deviations: Mapping[int, Deviation]) -> str:
    first = next(iter(deviations.values()))
    elements = max(deviation.elements for deviation in deviations.values())
    # NaN counts as largest: comparing with it is always False.
    largest = max(deviations.values(), key=lambda one: (math.isnan(one.absolute), one.absolute))
    place = f" at {list(first.index)}" if first.index else ""
    return (
        f"{elements} element{'s' if elements > 1 else ''} differ{'s' if elements == 1 else ''}, first{place}"
        f" {first.values[0]} instead of {first.values[1]}, by up to {largest.absolute:.3g} (relative"
        f" {largest.relative:.3g})"
    )

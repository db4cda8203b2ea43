"""How results of a training step on a whole batch follow from its results on parts, and where they do not."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from lightning_ddp_ext.verification.operations import Line, Operation
from lightning_ddp_ext.verification.replay import Gradients, ReplayedStep

# Of a result: `"same"` on all; `"rows"`, the parts put together; their `"sum"`, or a weighted `"mean"`; `"none"`
# of these; `"unknown"` if no number says.
Kind = Literal["same", "rows", "sum", "mean", "none", "unknown"]
Weights = tuple[float, ...]
"""Weights of a mean, which add up to 1."""
# Operations that order values or choose among them.
_CHOICES = re.compile("(a|arg|cum|nan)?(max|min|median|sort|topk|kthvalue|quantile|unique)")
# Exponents of the precision in a tolerance, 4e-10 for double and 7e-5 for single precision; and finer ones for a line.
ROUNDINGS = 0.6, 0.75, 0.9
_LARGE = 1e4  # numbers from which on masks of attention begin


@dataclass(frozen=True, slots=True)
class Culprit:
    """The operation at which samples influence each other, and what that means, in one clause."""

    line: Line | None  # None for a part of torch that no line of the program asks for
    meaning: str
    remedy: str = "compute each sample's loss from this sample alone, or gather what is needed from all ranks"


@dataclass(frozen=True, slots=True)
class _Matched:
    """An operation of the whole batch with its counterparts, and the relation of its first result that has one."""

    position: int
    operation: Operation
    kind: Kind
    weights: Weights  # of a mean
    shapes: tuple[torch.Size, ...]


class Differences:
    """Relates the operations of a step on a whole batch to the same operations on its parts, of `sizes` samples.

    `rounding` is the exponent of the precision in the tolerance, and `known` has weights of a mean, if any are known.
    """

    def __init__(
        self, whole: ReplayedStep, parts: list[ReplayedStep], sizes: list[int], rounding: float, known: Weights = ()
    ) -> None:
        self._operations, self._leading = whole.operations, whole.leading
        self._tolerance: float = find_precision(whole) ** rounding
        # Weights of means, by their divisors, and the lines that have these numbers.
        self.origin: dict[Weights, Line | None] = {}
        self._known = [tuple(size / sum(sizes) for size in sizes), *([known] if known else [])]
        self._matched: dict[int, _Matched] = {}
        for position, others in _match(self._operations, [part.operations for part in parts]).items():
            operation = self._operations[position]
            if operation.is_of_batch and "empty" not in operation.name:  # which sets no value
                self._relate(position, operation, others)

    def _relate(self, position: int, operation: Operation, others: Sequence[Operation]) -> None:
        before = len(self._known)
        for index, result in enumerate(operation.results):
            of_parts = [other.results[index] for other in others if len(other.results) > index]
            if len(of_parts) == len(others):
                kind, weights = self._find_relation(operation, result, of_parts)
                if kind == "sum" and result.numel() == 1:
                    self._learn([part.item() for part in of_parts])
                earlier = self._matched.get(position)
                if earlier is None or earlier.kind == "unknown" or kind == "none":  # the worst of its results
                    shapes = (result.shape, *(part.shape for part in of_parts))
                    self._matched[position] = _Matched(position, operation, kind, weights, shapes)
        self.origin.update(dict.fromkeys(self._known[before:], operation.line))

    def find(self) -> Culprit | None:
        """Return the first operation without a relation that leads to a loss, or else one of a backward pass."""
        none = [one for one in self._matched.values() if one.kind == "none"]
        for one in none:
            if one.position in self._leading:
                return Culprit(one.operation.line, self._explain(one))
        for one in none:
            if one.operation.is_backward and one.operation.line is not None:
                return Culprit(one.operation.line, "samples influence each other's gradients")
        return None

    def find_first(self, kind: Kind, weights: Weights = ()) -> Line | None:
        """Return the line of the first operation with a relation that leads to a loss."""
        alike = (one for one in self._matched.values() if (one.kind, one.weights) == (kind, weights))
        leading = (one.operation for one in alike if one.position in self._leading)
        return next((one.line for one in leading if not one.is_backward), None)

    def _explain(self, one: _Matched) -> str:
        """Return what an operation without a relation does."""
        whole, *parts = one.shapes
        inputs = [self._matched[source] for source in one.operation.sources if source in self._matched]
        kinds = {source.kind for source in inputs}
        if "batch_norm" in one.operation.name:
            return "batch normalisation computes with the statistics of the batch"
        if all(len(shape) == len(whole) for shape in parts):
            differing = sum(any(part[dim] != size for part in parts) for dim, size in enumerate(whole))
            if differing > 1:
                return "samples are compared with each other, as in a contrastive loss"
        if _CHOICES.fullmatch(one.operation.name):
            return "it depends on which other samples are in the batch (a choice, an extreme or a quantile)"
        if "rows" in kinds and {"mean", "sum", "none"} & kinds:
            return "each sample is shifted or scaled by a statistic of the batch"
        if kinds <= {"mean", "sum"} and len({(source.kind, source.weights) for source in inputs}) > 1:
            return "terms are combined that are means over different things, or a mean and a sum"
        if kinds and kinds <= {"mean", "sum", "same"}:
            return "it is no linear function of a mean or a sum over samples, as a root or a logarithm"
        return "samples influence each other"

    def _find_relation(self, operation: Operation, whole: Tensor, parts: Sequence[Tensor]) -> tuple[Kind, Weights]:
        """Return the relation of a result to the results of the parts, and the weights of a mean."""
        if any(part.dim() != whole.dim() or part.dtype != whole.dtype for part in parts) or whole.is_sparse:
            return "unknown", ()
        split = [dim for dim in range(whole.dim()) if any(part.shape[dim] != whole.shape[dim] for part in parts)]
        if len(parts) == 1:
            # An iteration over samples may add to the results of earlier ones.
            return "same" if not split and self._are_close(parts[0].double(), whole.double()) else "unknown", ()
        chooses = bool(_CHOICES.fullmatch(operation.name))
        if any(whole.shape[dim] != sum(part.shape[dim] for part in parts) for dim in split):
            return "none" if chooses and whole.is_floating_point() else "unknown", ()
        if len(split) == 1:
            self._learn([part.shape[split[0]] for part in parts])
        if not whole.is_floating_point():
            return "unknown" if split else self._relate_integers(whole, parts), ()
        if not all(one.isfinite().all() for one in (whole, *parts)):
            return "unknown", ()
        whole, parts = whole.double(), [part.double() for part in parts]
        if len(split) > 1:
            return "none", ()
        if split:
            return "rows" if self._are_rows(whole, parts, split[0], operation.is_backward, not chooses) else "none", ()
        return self._relate_alike(whole, parts)

    def _relate_integers(self, whole: Tensor, parts: Sequence[Tensor]) -> Kind:
        """Integers may be positions, which differ: they say something only if they are equal or sums."""
        if all(torch.equal(whole, part) for part in parts):
            return "same"
        return "sum" if whole.dtype != torch.bool and torch.equal(whole, sum(parts[1:], parts[0])) else "unknown"

    def _relate_alike(self, whole: Tensor, parts: Sequence[Tensor]) -> tuple[Kind, Weights]:
        """Return the relation of results of one shape."""
        if all(self._are_close(part, whole) for part in parts):
            return "same", ()
        stacked = torch.stack([part.flatten() for part in parts], dim=1)
        flat = whole.flatten()
        if self._are_close(stacked.sum(1), flat):
            return "sum", ()
        for weights in self._known:
            if self._are_close(stacked @ flat.new_tensor(weights), flat):
                return "mean", weights
        usual = flat.abs() < _LARGE
        fitted = fit_weights(stacked[usual], flat[usual]) if usual.sum() > len(parts) else None
        if fitted is not None and min(fitted) > -self._tolerance and abs(sum(fitted) - 1) < self._tolerance:
            is_fit = self._are_close(stacked @ flat.new_tensor(fitted), flat)
            return ("mean", fitted) if is_fit else ("none", ())
        return "none", ()

    def _learn(self, counts: Sequence[float]) -> None:
        """Note what means may be divided by."""
        total = sum(counts)
        if min(counts) < 0 or not 0 < total < math.inf:
            return
        weights = tuple(count / total for count in counts)
        if not any(all(map(math.isclose, weights, one)) for one in self._known):
            self._known.append(weights)

    def _are_close(self, one: Tensor, other: Tensor) -> bool:
        if not one.numel():
            return True
        size, difference = torch.maximum(one.abs(), other.abs()), (one - other).abs()
        # Large constants, as of masks, are compared by themselves: they allow nothing for the numbers beside them.
        return all(
            not part.any() or float(difference[part].max()) <= self._tolerance * float(size[part].max())
            for part in (size < _LARGE, size >= _LARGE)
        )

    def _are_rows(self, whole: Tensor, parts: Sequence[Tensor], dim: int, may_scale: bool, any_order: bool) -> bool:
        """Return True if the parts have the slices of the whole along a dimension, maybe in another order.

        In a backward pass each part may have a factor, since a mean over a part divides by less.
        """
        if may_scale:
            parts = [
                part * float((piece * part).sum() / square) if (square := part.square().sum()) else part
                for piece, part in zip(torch.split(whole, [part.shape[dim] for part in parts], dim), parts, strict=True)
            ]
        together = torch.cat([*parts], dim)
        if self._are_close(together, whole):
            return True
        if not any_order:
            return False
        # Rows in another order have the same projections, as of packed sequences or of time-major features.
        rows = [one.movedim(dim, 0).reshape(one.shape[dim], -1) for one in (whole, together)]
        direction = torch.linspace(1.0, 2.0, rows[0].shape[1], dtype=whole.dtype, device=whole.device)
        large = [row.where(row.abs() >= _LARGE, 0.0) for row in rows]
        usual = [row - other for row, other in zip(rows, large, strict=True)]
        return all(self._are_close(*[(row @ direction).sort().values for row in pair]) for pair in (usual, large))


class GradientFit:
    """Compares weighted sums of the gradients of the parts with the gradient of the whole batch."""

    def __init__(self, whole: Gradients, parts: Sequence[Gradients]) -> None:
        self._names, self._numbers = [name for name, _ in whole], [len(one) for _, one in whole]
        self._whole = torch.cat([one for _, one in whole])
        self._parts = torch.stack([torch.cat([one for _, one in part]) for part in parts], dim=1)

    @cached_property
    def fitted(self) -> Weights | None:
        """The weights with the least difference; None if they are not unique, or fit any gradient."""
        used = int(((self._parts != 0).any(1) | (self._whole != 0)).sum())
        is_finite = self._parts.isfinite().all() and self._whole.isfinite().all()
        return fit_weights(self._parts, self._whole) if used > self._parts.shape[1] and is_finite else None

    def difference(self, weights: Sequence[float]) -> float:
        """Return the norm of the difference between weighted parts and whole, relative to the norm of the whole."""
        return relative_difference(self._sum(weights), self._whole)

    def worst(self, weights: Sequence[float]) -> tuple[str, float]:
        """Return the parameter with the largest part of the difference, and its relative difference."""
        pairs = zip(*(torch.split(vector, self._numbers) for vector in (self._sum(weights), self._whole)), strict=True)
        by_name = dict(zip(self._names, pairs, strict=True))
        name = max(by_name, key=lambda name: float((by_name[name][0] - by_name[name][1]).norm()))
        return name, relative_difference(*by_name[name])

    def _sum(self, weights: Sequence[float]) -> Tensor:
        return self._parts @ torch.tensor(weights, dtype=torch.float64)


def find_precision(step: ReplayedStep) -> float:
    """Return the coarsest precision of the results that depend on the batch and lead to a loss.

    Others, such as the angles of positions and logged values, have the same rounding in parts, or no influence.
    """
    leading = [step.operations[place] for place in step.leading] or step.operations
    results = (one for operation in leading if operation.is_of_batch for one in operation.results)
    found = (torch.finfo(one.dtype).eps for one in results if one.is_floating_point())
    return max(found, default=torch.finfo(torch.float64).eps)


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Return the norm of a difference, relative to the norm of the other vector."""
    size, norm = float((one - other).norm()), float(other.norm())
    return size / norm if norm else size and float("inf")


def fit_weights(parts: Tensor, whole: Tensor) -> Weights | None:
    """Return the factors of columns `parts` whose sum is next to `whole`; None if they are not unique."""
    found = torch.linalg.lstsq(parts, whole[:, None], driver="gelsd")
    return tuple(found.solution[:, 0].tolist()) if int(found.rank) == parts.shape[1] else None


def _match(whole: Sequence[Operation], parts: Sequence[Sequence[Operation]]) -> dict[int, list[Operation]]:
    """Return the counterparts of operations in the parts, by their position in the whole, in its order.

    Operations with the same name and lines correspond in their order, if there are equally many. If there are as many
    as in all parts together, as in a loop over samples, each corresponds to one of one part.
    """
    groups: list[dict[object, list[int]]] = []
    for run in (whole, *parts):
        group: dict[object, list[int]] = defaultdict(list)
        for position, operation in enumerate(run):
            group[operation.name, operation.lines, operation.is_backward].append(position)
        groups.append(group)
    found: dict[int, list[Operation]] = {}
    for key, positions in groups[0].items():
        others = [group.get(key, []) for group in groups[1:]]
        if all(len(other) == len(positions) for other in others):
            for place, position in enumerate(positions):
                found[position] = [run[other[place]] for run, other in zip(parts, others, strict=True)]
        elif len(positions) == sum(map(len, others)):
            each = [run[index] for run, other in zip(parts, others, strict=True) for index in other]
            found.update({position: [operation] for position, operation in zip(positions, each, strict=True)})
    return dict(sorted(found.items()))

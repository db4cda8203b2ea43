"""The first operation of a training step whose result on a batch does not follow from the results on its parts."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from lightning_ddp_ext.verification.operations import Line, Operation, Recording
from lightning_ddp_ext.verification.relations import CHOICES, Relation, Relations
from lightning_ddp_ext.verification.replay import ReplayedStep

# Exponents of the precision in a tolerance, 4e-10 for double and 7e-5 for single precision; and finer ones for a line.
ROUNDING, FINER = 0.6, (0.75, 0.9)


@dataclass(frozen=True, slots=True)
class Culprit:
    """The operation at which samples influence each other, and what that means.

    Attributes:
        line: Where; None for a part of torch that no line of the program asks for.
        meaning: What it means, in one clause.
        remedy: What to do.
    """

    line: Line | None
    meaning: str
    remedy: str = "compute each sample's loss from this sample alone, or gather what is needed from all ranks"


@dataclass(frozen=True, slots=True)
class _Matched:
    """An operation of the whole batch with its counterparts, and the relation of its first result that has one."""

    position: int
    operation: Operation
    relation: Relation
    shapes: tuple[torch.Size, ...]


class Differences:
    """Relates the operations of a step on a whole batch to those of the same step on its parts.

    Args:
        whole: The step on the whole batch.
        parts: The steps on its parts.
        sizes: Number of samples of each part.
        rounding: Exponent of the precision in the tolerance.
        known: Weights of a mean, if any are known.
    """

    def __init__(
        self,
        whole: ReplayedStep,
        parts: Sequence[ReplayedStep],
        sizes: Sequence[int],
        rounding: float = ROUNDING,
        known: tuple[float, ...] | None = None,
    ) -> None:
        self._recording, self._losses = _recording_of(whole), whole.losses
        operations = self._recording.operations
        # What does not depend on the batch, such as the angles of positions, has the same rounding in parts.
        results = (one for operation in operations if operation.is_of_batch for one in operation.results)
        self.precision = max(torch.finfo(one.dtype).eps for one in results if one.is_floating_point())  # the coarsest
        self._relations = Relations(sizes, self.precision**rounding)
        if known is not None:
            self._relations.known.append(known)
        self._parts = [_recording_of(part).operations for part in parts]
        self._origin: dict[tuple[float, ...], Line | None] = {}

    @cached_property
    def _matched(self) -> dict[int, _Matched]:
        operations, found = self._recording.operations, dict[int, _Matched]()
        counterparts = _match(operations, self._parts)
        for position, operation in enumerate(operations):
            others = counterparts.get(position)
            if others is not None and operation.is_of_batch and "empty" not in operation.name:  # which sets no value
                self._relate(found, position, operation, others)
        return found

    @property
    def origin(self) -> dict[tuple[float, ...], Line | None]:
        """The weights of means, and the lines that have what these are divided by."""
        return self._origin if self._matched else {}

    def _relate(
        self, matched: dict[int, _Matched], position: int, operation: Operation, others: Sequence[Operation]
    ) -> None:
        before = len(self._relations.known)
        for index, result in enumerate(operation.results):
            of_parts = [other.results[index] for other in others if len(other.results) > index]
            if len(of_parts) == len(others):
                found = self._relations.find(operation.name, result, of_parts, operation.is_backward)
                earlier = matched.get(position)
                # The worst of its results.
                if earlier is None or earlier.relation.kind == "unknown" or found.kind == "none":
                    shapes = (result.shape, *(part.shape for part in of_parts))
                    matched[position] = _Matched(position, operation, found, shapes)
        for weights in self._relations.known[before:]:
            self._origin[weights] = operation.line

    def find(self) -> Culprit | None:
        """Return the first operation without a relation that leads to a loss, or else one of a backward pass."""
        leading = self._recording.leading_to(self._losses)
        none = [one for one in self._matched.values() if one.relation.kind == "none"]
        for one in none:
            if one.position in leading:
                return Culprit(one.operation.line, self._explain(one))
        for one in none:
            if one.operation.is_backward and one.operation.line is not None:
                return Culprit(one.operation.line, "samples influence each other's gradients")
        return None

    def find_first(self, relation: Relation) -> Line | None:
        """Return the line of the first operation with a relation that leads to a loss."""
        leading = self._recording.leading_to(self._losses)
        for one in self._matched.values():
            if one.position in leading and one.relation == relation and not one.operation.is_backward:
                return one.operation.line
        return None

    def _explain(self, one: _Matched) -> str:
        """Return what an operation without a relation does."""
        name = one.operation.name
        whole, *parts = one.shapes
        inputs = [self._matched[source].relation for source in one.operation.sources if source in self._matched]
        kinds = [relation.kind for relation in inputs]
        if "batch_norm" in name:
            return "batch normalisation computes with the statistics of the batch"
        if all(len(shape) == len(whole) for shape in parts):
            differing = sum(any(part[dim] != size for part in parts) for dim, size in enumerate(whole))
            if differing > 1:
                return "samples are compared with each other, as in a contrastive loss"
        if CHOICES.fullmatch(name):
            return "it depends on which other samples are in the batch (a choice, an extreme or a quantile)"
        if "rows" in kinds and {"mean", "sum", "none"} & {*kinds}:
            return "each sample is shifted or scaled by a statistic of the batch"
        weights = {relation.weights if relation.kind == "mean" else relation.kind for relation in inputs}
        if {*kinds} <= {"mean", "sum"} and len(weights) > 1:
            return "terms are combined that are means over different things, or a mean and a sum"
        if kinds and {*kinds} <= {"mean", "sum", "same"}:
            return "it is no linear function of a mean or a sum over samples, as a root or a logarithm"
        return "samples influence each other"


def _recording_of(step: ReplayedStep) -> Recording:
    assert step.recording is not None
    return step.recording


def _match(whole: Sequence[Operation], parts: Sequence[Sequence[Operation]]) -> dict[int, list[Operation]]:
    """Return the counterparts of operations in the parts, by their position in the whole.

    Operations with the same name, line and module correspond in their order, if there are equally many. If there are as
    many as in all parts together, as in a loop over samples, each corresponds to one of one part.
    """
    groups: list[dict[object, list[int]]] = []
    for run in (whole, *parts):
        group: dict[object, list[int]] = defaultdict(list)
        for position, operation in enumerate(run):
            group[operation.name, operation.line, operation.module, operation.is_backward].append(position)
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
    return found

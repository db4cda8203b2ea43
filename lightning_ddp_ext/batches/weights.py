"""Weights of the parts of a batch, for combining their losses, gradients and logged values."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

WeightBy = Literal["samples", "equal", "sum"] | Callable[[Any], float]

_NAMES = ("samples", "equal", "sum")


def check_weight_by(weight_by: object) -> None:
    """Check the value of a `weight_by` argument."""
    if callable(weight_by) or weight_by in _NAMES:
        return
    raise ValueError(
        f"`weight_by` must be one of {', '.join(map(repr, _NAMES))} or a callable `batch -> float`, got {weight_by!r}."
        ' Use "samples" for a loss that is a mean over samples.'
    )


def combination_weights(weight_by: WeightBy, chunks: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Return the factor of each chunk's loss in the loss of the whole batch; all are 0 if no chunk has weight.

    The factors add up to 1, except with `"sum"`, where each is 1.
    """
    if weight_by == "sum":
        return [1.0] * len(sizes)
    if weight_by == "equal":
        return [1.0 / len(sizes)] * len(sizes)
    weights = [float(weight) for weight in (map(weight_by, chunks) if callable(weight_by) else sizes)]
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(
            f"`weight_by` returned {weights} for the chunks of a batch. Return a finite number of at least 0 for every"
            " chunk."
        )
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]


class GradientWeights:
    """Weight of this rank's gradient, over the micro-batches of an optimizer step.

    The loss of a micro-batch is multiplied by its weight relative to the first one, which is 1 as long as weights are
    equal. The accumulated gradient times the first weight is then the weighted sum.
    """

    def __init__(self, weight_by: WeightBy) -> None:
        self._weight_by = weight_by
        self.is_sum = weight_by == "sum"  # losses are sums: gradients are added up, not averaged
        self.batch_weight = 0.0  # weight of the values that the micro-batch logs
        self.in_gradient = 0.0  # weight of the micro-batch in the gradient; 0 if its step was skipped
        self._first = self._total = 0.0
        self._is_added = True

    def restart(self) -> None:
        """Forget the micro-batches so far: their gradients have been dropped."""
        self._first = self._total = 0.0

    def set_batch(self, batch: Any, samples: float = 1.0) -> None:
        """Weigh a micro-batch; `samples` is its size, or one number for all batches if sizes are unknown."""
        weight = 1.0
        if callable(self._weight_by):
            weight = float(self._weight_by(batch))
            if not 0 <= weight < math.inf:
                raise ValueError(
                    f"`weight_by` returned {weight} for a batch. Return a finite number of at least 0, such as its"
                    " number of samples or tokens."
                )
        elif self._weight_by == "samples":
            weight = samples
        self._set_weight(weight)

    def set_no_batch(self) -> None:
        """Set weight 0: this rank has no micro-batch, but other ranks have one."""
        self._set_weight(0.0)

    def _set_weight(self, weight: float) -> None:
        self.batch_weight = self.in_gradient = weight
        self._is_added = False

    def skip_batch(self) -> None:
        """Give the micro-batch no weight in the gradient. Values logged in its step keep theirs."""
        self.in_gradient = 0.0

    def add_batch(self) -> float:
        """Add the micro-batch's weight, once until `pop` however often it is called; return the factor of its loss."""
        if not self._is_added:
            self._is_added = True
            self._total += self.in_gradient
            self._first = self._first or self.in_gradient
        return self.in_gradient / self._first if self._first else 0.0

    def pop(self) -> tuple[float, float]:
        """Return the weight of the added micro-batches and the factor of their accumulated gradient; reset both."""
        first, total = self._first, self._total
        self.restart()
        self._is_added = False
        return total, first


class SkipWarning:
    """Warning, shown once, that `training_step` has returned None for a part of a batch."""

    def __init__(self) -> None:
        self._is_shown = False

    def show(self, part: str) -> None:
        """Warn, the first time only; `part` says where the step returned None, such as `"rank 1"`."""
        if self._is_shown:
            return
        self._is_shown = True
        warnings.warn(
            f"`training_step` returned None on {part}, whose samples have no weight in the gradient of this step."
            " Ignore this warning if that is on purpose. Log with `sync_dist=True` before returning None, if at all.",
            category=UserWarning,
            stacklevel=3,
        )

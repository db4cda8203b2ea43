"""What a part of a batch counts when losses, gradients and logged values of the parts are combined."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

WeightBy = Literal["samples", "equal", "sum"] | Callable[[Any], float]

_NAMES = ("samples", "equal", "sum")


def check_weight_by(weight_by: object) -> None:
    """Check the value of a `weight_by` argument.

    Args:
        weight_by: `"samples"`, `"equal"`, `"sum"` or a callable from a batch to a number.

    Raises:
        ValueError: If it is none of these.
    """
    if callable(weight_by) or weight_by in _NAMES:
        return
    raise ValueError(
        f"`weight_by` must be one of {', '.join(map(repr, _NAMES))} or a callable `batch -> float`, got {weight_by!r}."
        ' Use "samples" for a loss that is a mean over samples.'
    )


def combination_weights(weight_by: WeightBy, chunks: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Compute the factors with which the losses of the parts add up to the loss of the whole batch.

    Args:
        weight_by: `"samples"` for losses that are means over samples (its share of the samples); `"equal"` to count
            every part once; `"sum"` for losses that are sums (each factor is 1); or a callable that returns what a part
            counts, such as its number of non-padding tokens. Where no part counts anything, each factor is 0.
        chunks: The parts, each with at least one sample.
        sizes: Number of samples of each part.

    Returns:
        One factor per part.

    Raises:
        ValueError: If a callable returns a negative number or one that is not finite.
    """
    if weight_by == "sum":
        return [1.0] * len(sizes)
    if weight_by == "equal":
        return [1.0 / len(sizes)] * len(sizes)
    if weight_by == "samples":
        counts = [float(size) for size in sizes]
    else:
        counts = [float(weight_by(chunk)) for chunk in chunks]
    if not all(0 <= count < math.inf for count in counts):
        raise ValueError(
            f"`weight_by` returned {counts} for the chunks of a batch. Return a finite number of at least 0 for every"
            " chunk."
        )
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


class GradientWeights:
    """What this rank's gradient counts, over the micro-batches of an optimizer step.

    Micro-batches of different sizes are made comparable by a factor on their losses, 1 as long as sizes do not change:
    the accumulated gradient is then the first micro-batch's weight short of a weighted sum.

    Args:
        weight_by: See `combination_weights`; `"equal"` counts every micro-batch once.

    Attributes:
        batch_weight: What the values that the micro-batch logs count.
        in_gradient: What its gradient counts.
    """

    def __init__(self, weight_by: WeightBy) -> None:
        self._weight_by = weight_by
        self.is_sum = weight_by == "sum"  # whether losses are sums, so that gradients are added up, not averaged
        self.batch_weight = self.in_gradient = 0.0
        self._first = 0.0
        self._total = 0.0
        self._counted = True

    def restart(self) -> None:
        """Forget the micro-batches so far: their gradients have been dropped."""
        self._first = self._total = 0.0

    def set_batch(self, batch: Any, samples: float = 1.0) -> None:
        """Measure a micro-batch.

        Args:
            batch: A batch.
            samples: Its number of samples, or the same number for all batches that cannot be compared.

        Raises:
            ValueError: If a callable returns a negative number, or one that is not finite.
        """
        self.batch_weight = self.in_gradient = self._measure(batch, samples)
        self._counted = False

    def set_no_batch(self) -> None:
        """Have no micro-batch, while other ranks have one."""
        self.batch_weight = self.in_gradient = 0.0
        self._counted = False

    def skip_batch(self) -> None:
        """Give the micro-batch no weight in the gradient. Values logged in its step keep theirs."""
        self.in_gradient = 0.0

    def add_batch(self) -> float:
        """Count the micro-batch, once between two synchronisations, however often it is passed backward.

        Returns:
            What its loss is to be multiplied by.
        """
        if not self._counted:
            self._counted = True
            self._total += self.in_gradient
            self._first = self._first or self.in_gradient
        return self.in_gradient / self._first if self._first else 0.0

    def pop(self) -> tuple[float, float]:
        """Take the weight of the micro-batches counted so far, and start again.

        Returns:
            What this rank counts, and what its accumulated gradient is to be multiplied by.
        """
        first, total = self._first, self._total
        self.restart()
        self._counted = False
        return total, first

    def _measure(self, batch: Any, samples: float) -> float:
        if not callable(self._weight_by):
            return samples if self._weight_by == "samples" else 1.0
        weight = float(self._weight_by(batch))
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"`weight_by` returned {weight} for a batch. Return a finite number of at least 0, such as its number"
                " of samples or tokens."
            )
        return weight


class SkipWarning:
    """The warning that `training_step` has returned None for a part of a batch; shown once."""

    def __init__(self) -> None:
        self._is_shown = False

    def show(self, part: str) -> None:
        """Warn, unless that was done before.

        Args:
            part: Where it returned None, such as `"rank 1"`.
        """
        if self._is_shown:
            return
        self._is_shown = True
        warnings.warn(
            f"`training_step` returned None on {part}, whose samples have no weight in the gradient of this step."
            " Ignore this warning if that is on purpose. Log with `sync_dist=True` before returning None, if at all.",
            category=UserWarning,
            stacklevel=3,
        )

"""What a part of a batch counts when losses, gradients and logged values of the parts are combined."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

WeightBy = Literal["samples", "ranks", "sum"] | Callable[[Any], float]

_NAMES = ("samples", "ranks", "sum")


def check_weight_by(weight_by: object) -> None:
    """Check the value of a `weight_by` argument.

    Args:
        weight_by: `"samples"`, `"ranks"`, `"sum"` or a callable from a batch to a number.

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
        weight_by: `"samples"` for losses that are means over samples (its share of the samples); `"ranks"` to count
            every part once; `"sum"` for losses that are sums (each factor is 1); or a callable that returns what a part
            counts, such as its number of non-padding tokens.
        chunks: The parts, each with at least one sample.
        sizes: Number of samples of each part.

    Returns:
        One factor per part.

    Raises:
        ValueError: If a callable returns a negative number, or zero for every part.
    """
    if weight_by == "sum":
        return [1.0] * len(sizes)
    if weight_by == "ranks":
        return [1.0 / len(sizes)] * len(sizes)
    if weight_by == "samples":
        counts = [float(size) for size in sizes]
    else:
        counts = [float(weight_by(chunk)) for chunk in chunks]
    total = sum(counts)
    if min(counts) < 0 or total <= 0:
        raise ValueError(
            f"`weight_by` returned {counts} for the chunks of a batch. Return a non-negative number for every chunk,"
            " above zero for at least one."
        )
    return [count / total for count in counts]

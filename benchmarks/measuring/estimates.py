"""Medians with their intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

CONFIDENCE = 0.95
NOT_SOUND = "too noisy"
FEWEST = 6  # values, below which no two of them enclose the median with that confidence


@dataclass(frozen=True, slots=True)
class Estimate:
    """The median of some values, and an interval that holds the median of all such values."""

    median: float
    low: float
    high: float


def estimate_median(values: Sequence[float]) -> Estimate | None:
    """Return the median with its exact 95 % interval, whatever the distribution; None for fewer than six values.

    The number of `n` independent values below the true median is binomial with probability 1/2. So the `l`-th smallest
    and the `l`-th largest value enclose it with probability `1 - 2 * P(B < l)`, and `l` is the largest number for which
    that is 95 % or more: H. A. David and H. N. Nagaraja, Order Statistics, 3rd edition, section 7.1.
    """
    if len(values) < FEWEST:
        return None
    ordered = sorted(values)
    tail = _choose_tail(len(ordered))
    return Estimate(statistics.median(ordered), ordered[tail - 1], ordered[-tail])


def _choose_tail(count: int) -> int:
    """The largest `l` for which `P(B < l)` is at most half of what the interval may miss."""
    tail, below = 0, 0.0
    while (below := below + math.comb(count, tail) / 2**count) <= (1 - CONFIDENCE) / 2:
        tail += 1
    return tail


def estimate_to_json(estimate: Estimate | None) -> dict[str, Any] | None:
    """Return the numbers of an estimate by name."""
    return None if estimate is None else asdict(estimate)


def format_ratio(estimate: Estimate | None, factor: float = 1.0) -> str:
    """Write a median with its interval, both multiplied by a factor."""
    if estimate is None:
        return NOT_SOUND
    return f"{factor * estimate.median:.2f} [{factor * estimate.low:.2f}, {factor * estimate.high:.2f}]"

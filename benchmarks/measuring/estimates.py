"""Medians with their intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
FEWEST = 6  # values, below which no two of them enclose the median with that confidence


@dataclass(frozen=True, slots=True)
class Estimate:
    """The median of some values, and an interval that holds the median of all such values."""

    median: float
    low: float
    high: float


def estimate_median(values: Sequence[float]) -> Estimate | None:
    """Return the median with its exact 95 % interval, whatever the distribution.

    The number of `n` independent values below the true median is binomial with probability 1/2. So the `l`-th smallest
    and the `l`-th largest value enclose it with probability `1 - 2 * P(B < l)`, and `l` is the largest number for which
    that is 95 % or more: H. A. David and H. N. Nagaraja, Order Statistics, 3rd edition, section 7.1.

    Args:
        values: In any order.

    Returns:
        None for fewer than six values.
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


def floor_of_ratio(
    one_thread_step: float, best_step: float, one_thread_passes: float, two_threads_passes: float
) -> float:
    """Return the ratio to the best single device that a strategy with two threads would reach if it cost nothing.

    What a step does besides forward and backward stays as it is; forward and backward take what bare threads take.

    Args:
        one_thread_step: Seconds of a whole step on one device with one thread.
        best_step: Seconds of a whole step on one device with the best number of threads.
        one_thread_passes: Seconds of bare forward and backward of the whole batch in one thread.
        two_threads_passes: Seconds until both of two threads have done so with half of the batch.
    """
    return (one_thread_step - one_thread_passes + two_threads_passes) / best_step

"""The controller of `balance="auto"`, which follows measured times. Pure arithmetic."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from lightning_ddp_ext.batches.chunk_sizes import limited_chunks, proportional_chunks

WINDOW = 7  # batches behind each decision: shorter averages followed single slow batches
LONGEST_WINDOW = 112
SUSTAINED = 5  # batches of a window that must show the imbalance
START_AT = 0.10  # imbalance from which samples are moved ...
STOP_AT = 0.05  # ... until it is below this


@dataclass(frozen=True, slots=True)
class Decision:
    """Chunk sizes before and after a decision of the controller, and the measurement behind it in words."""

    before: list[int]
    after: list[int]
    reason: str

    def __str__(self) -> str:
        before, after = (", ".join(map(str, sizes)) for sizes in (self.before, self.after))
        return f"settled at {after}; {self.reason}" if before == after else f"{before} -> {after}; {self.reason}"


class BalanceController:
    """Finds the shares with which all replicas take equally long for a batch.

    The imbalance is the time of the slowest replica relative to the mean, less 1, in the medians of a window of
    batches. Every replica keeps at least one sample, since its speed could not be measured otherwise.
    """

    def __init__(self, num_replicas: int) -> None:
        self.shares = [1.0 / num_replicas] * num_replicas
        self.limits: list[int | None] = [None] * num_replicas  # most samples that each replica has memory for
        self._sizes: list[int] = []  # of the batches in the window
        self._window: deque[list[float]] | None = None  # None before the first batch of these sizes
        self._length = WINDOW
        # Shares, slowest time and imbalance before the last move.
        self._previous: tuple[list[float], float, float] | None = None
        self._is_moving = self._has_moved = self._is_settled = False
        self._smaller = 0  # batches in a row below the full size

    def split_sizes(self, batch_size: int) -> list[int]:
        """Divide a batch by the current shares, within the limits as far as other replicas have room."""
        return self._divide(batch_size, self.shares)

    def _divide(self, batch_size: int, shares: Sequence[float]) -> list[int]:
        replicas = len(shares)
        if batch_size < replicas:
            return proportional_chunks(batch_size, shares)
        above_one = [max(batch_size * share - 1, 0.0) for share in shares]
        rest = proportional_chunks(batch_size - replicas, above_one if any(above_one) else [1.0] * replicas)
        return limited_chunks([1 + chunk for chunk in rest], self.limits)

    def observe(self, sizes: Sequence[int], seconds: Sequence[float]) -> Decision | None:
        """Add the chunk sizes and times of a training batch; return a decision if one was made."""
        sizes = list(sizes)
        self._smaller = self._smaller + 1 if sum(sizes) < sum(self._sizes) else 0
        if 0 < self._smaller < WINDOW or not all(sizes):
            return None  # the last batch of an epoch, or one that could not be divided by the shares
        if sizes != self._sizes:
            self._sizes = sizes
            self._previous = None  # measured with other batches
            self._window = None
        if self._window is None:
            self._window = deque()  # without this batch: the first of a size allocates memory and chooses kernels
            return None
        self._window.append(list(seconds))
        if len(self._window) < self._length:
            return None
        decision = self._decide(self._window)
        if self._window:
            self._window.popleft()
        return decision

    def _decide(self, window: Sequence[Sequence[float]]) -> Decision | None:
        times = [median(column) for column in zip(*window, strict=True)]
        slowest = max(times)
        imbalance = slowest / fmean(times) - 1
        previous, self._previous = self._previous, None
        # A move that shortened the batch is kept even if the ratio rose, and one that lowered the ratio is kept even
        # if all replicas became slower: the machine may have become busier.
        if previous is not None and slowest >= previous[1] and imbalance >= previous[2]:
            self._length = min(2 * self._length, LONGEST_WINDOW)
            self._is_moving = False
            return self._move(
                previous[0],
                f"the slowest replica took {_ms([previous[1]])} before, {previous[2]:.0%} longer than the mean, and"
                f" takes {_ms([slowest])} now, {imbalance:.0%} longer",
            )
        threshold = STOP_AT if self._is_moving else START_AT
        index = times.index(slowest)
        shown = sum(seconds[index] > (1 + threshold) * fmean(seconds) for seconds in window)
        if imbalance <= threshold or shown * WINDOW < SUSTAINED * len(window):
            return self._settle(f"the slowest replica takes {imbalance:.0%} longer than the mean ({_ms(times)})")
        throughputs = [size / time for size, time in zip(self._sizes, times, strict=True)]
        shares = [throughput / sum(throughputs) for throughput in throughputs]
        sizes = self._divide(sum(self._sizes), shares)
        expected = max(size / throughput for size, throughput in zip(sizes, throughputs, strict=True))
        if sizes == self._sizes or expected >= slowest:
            within = "" if all(limit is None for limit in self.limits) else " within the memory"
            return self._settle(f"whole samples{within} allow no better than {_ms(times)}")
        if self._is_settled and self._has_moved:
            self._length = min(2 * self._length, LONGEST_WINDOW)
        self._previous, self._is_moving, self._has_moved = (self.shares, slowest, imbalance), True, True
        reason = f"replica {index} takes {imbalance:.0%} longer than the mean"
        return self._move(shares, f"{reason} ({_ms(times)}, medians of {len(window)} batches)")

    def _move(self, shares: list[float], reason: str) -> Decision:
        before = self._sizes
        self.shares, self._is_settled = shares, False
        self._sizes = self.split_sizes(sum(before))
        self._window = None
        return Decision(before, self._sizes, reason)

    def _settle(self, reason: str) -> Decision | None:
        self._is_moving = False
        was_settled, self._is_settled = self._is_settled, True
        return None if was_settled else Decision(self._sizes, self._sizes, reason)

    def state_dict(self) -> dict[str, Any]:
        """Return the shares and the length of the window, in plain numbers for a checkpoint."""
        return {"shares": list(self.shares), "batches": self._length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, which must have as many shares as there are replicas."""
        self.shares, self._length = list(state["shares"]), state["batches"]


def _ms(seconds: Sequence[float]) -> str:
    return " and ".join(f"{1000 * value:.1f}" for value in seconds) + " ms"

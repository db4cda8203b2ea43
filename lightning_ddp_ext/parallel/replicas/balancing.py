"""The controller that moves samples towards the replicas that finish first."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from lightning_ddp_ext.parallel.batches.chunking import proportional_chunks

WINDOW = 7  # batches behind each decision: an average over fewer followed single slow batches
LONGEST_WINDOW = 112
SUSTAINED = 5  # batches of a window that must show the imbalance
START_AT = 0.10  # imbalance from which samples are moved ...
STOP_AT = 0.05  # ... until it is below this


@dataclass(frozen=True, slots=True)
class Decision:
    """What the controller has decided, and why.

    Attributes:
        before: Chunk sizes so far.
        after: Chunk sizes from now on; the same if it has settled.
        reason: The measurement behind it, in words.
    """

    before: list[int]
    after: list[int]
    reason: str


class BalanceController:
    """Finds the proportions in which replicas finish a batch at the same time.

    Imbalance is how much longer the slowest replica takes than the mean, of the median times of 7 batches of full size.
    Above 10 %, if 5 of the 7 batches show it, each replica's share becomes proportional to its measured throughput
    (samples per second), and it is measured again, until the imbalance is below 5 % or whole samples allow no better.
    A move that has lowered neither the imbalance nor the time of the slowest replica is taken back. After that, and
    whenever it has to move again after it had settled, decisions rest on twice as many batches. Every replica keeps at
    least one sample, or it could not be measured any more.

    Args:
        num_replicas: Number of replicas.
    """

    def __init__(self, num_replicas: int) -> None:
        self._shares = [1.0 / num_replicas] * num_replicas
        self._limits: list[int | None] = [None] * num_replicas
        # Shares, slowest time and imbalance before the last move.
        self._previous: tuple[list[float], float, float] | None = None
        self._window: deque[list[float]] = deque()
        self._length = WINDOW
        self._sizes: list[int] = []
        self._warm = False
        self._moving = False
        self._has_moved = False
        self._settled = False
        self._batch_size = 0
        self._smaller = 0  # batches in a row below the full size

    @property
    def shares(self) -> list[float]:
        """Each replica's share of a batch; they add up to 1."""
        return list(self._shares)

    def chunk_sizes(self, batch_size: int) -> list[int]:
        """Share a batch.

        Args:
            batch_size: Number of samples.

        Returns:
            One chunk size per replica, within the limits where the others have room.
        """
        return self._cut(batch_size, self._shares)

    def limit(self, limits: Sequence[int | None]) -> None:
        """Set the most samples that each replica has memory for; None for no limit."""
        self._limits = list(limits)

    def _cut(self, batch_size: int, shares: Sequence[float]) -> list[int]:
        replicas = len(shares)
        if batch_size < replicas:
            return proportional_chunks(batch_size, shares)
        sizes = [1 + chunk for chunk in proportional_chunks(batch_size - replicas, _above_one(batch_size, shares))]
        return _within(sizes, self._limits)

    def observe(self, sizes: Sequence[int], seconds: Sequence[float]) -> Decision | None:
        """Take in one training batch.

        Args:
            sizes: Number of samples of each replica.
            seconds: Time that each replica took, forward and backward.

        Returns:
            A decision where one was made, to be logged.
        """
        sizes = list(sizes)
        batch_size = sum(sizes)
        self._smaller = self._smaller + 1 if batch_size < self._batch_size else 0
        if (0 < self._smaller < WINDOW) or not all(sizes):
            return None  # the last batch of an epoch, or one that could not be cut as planned
        if self._smaller:  # not the last one of an epoch: batches have become smaller
            self._batch_size = 0
        if batch_size > self._batch_size or sizes != self._sizes:
            self._batch_size, self._sizes = batch_size, sizes
            self._previous = None  # times of other batches are no measure for these
            self._window.clear()
            self._warm = False
        if not self._warm:  # the first batch of a new size allocates memory and chooses kernels
            self._warm = True
            return None
        self._window.append(list(seconds))
        if len(self._window) < self._length:
            return None
        decision = self._decide()
        if self._window:
            self._window.popleft()
        return decision

    def _decide(self) -> Decision | None:
        times = [median(column) for column in zip(*self._window, strict=True)]
        slowest = max(times)
        imbalance = slowest / fmean(times) - 1
        previous, self._previous = self._previous, None
        # A move that made the batch shorter is kept, whatever it did to the ratio; so is one that met a busier machine.
        if previous is not None and slowest >= previous[1] and imbalance >= previous[2]:
            self._length = min(2 * self._length, LONGEST_WINDOW)
            self._moving = False
            return self._move(
                previous[0],
                f"the slowest replica took {_ms([previous[1]])} before, {previous[2]:.0%} longer than the mean, and"
                f" takes {_ms([slowest])} now, {imbalance:.0%} longer",
            )
        threshold = STOP_AT if self._moving else START_AT
        if imbalance <= threshold or not self._is_sustained(times.index(slowest), threshold):
            return self._settle(f"the slowest replica takes {imbalance:.0%} longer than the mean ({_ms(times)})")
        throughputs = [size / time for size, time in zip(self._sizes, times, strict=True)]
        shares = [throughput / sum(throughputs) for throughput in throughputs]
        sizes = self._cut(self._batch_size, shares)
        expected = max(size / throughput for size, throughput in zip(sizes, throughputs, strict=True))
        if sizes == self._sizes or expected >= slowest:
            within = "" if all(limit is None for limit in self._limits) else " within the memory"
            return self._settle(f"whole samples{within} allow no better than {_ms(times)}")
        if self._settled and self._has_moved:
            self._length = min(2 * self._length, LONGEST_WINDOW)
        self._previous, self._moving, self._has_moved = (self._shares, slowest, imbalance), True, True
        return self._move(
            shares,
            f"replica {times.index(slowest)} takes {imbalance:.0%} longer than the mean ({_ms(times)}, medians of"
            f" {len(self._window)} batches)",
        )

    def _is_sustained(self, slowest: int, threshold: float) -> bool:
        shown = [seconds[slowest] > (1 + threshold) * fmean(seconds) for seconds in self._window]
        return sum(shown) * WINDOW >= SUSTAINED * len(shown)

    def _move(self, shares: list[float], reason: str) -> Decision:
        before = self._sizes
        self._shares, self._settled = shares, False
        self._sizes = self._cut(self._batch_size, shares)
        self._window.clear()
        self._warm = False
        return Decision(before, self._sizes, reason)

    def _settle(self, reason: str) -> Decision | None:
        self._moving = False
        if self._settled:
            return None
        self._settled = True
        return Decision(self._sizes, self._sizes, reason)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold, in plain numbers."""
        return {"shares": list(self._shares), "batches": self._length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state.

        Raises:
            ValueError: If it is that of another number of replicas.
        """
        if len(state["shares"]) != len(self._shares):
            raise ValueError(f"the state is that of {len(state['shares'])} replicas, not of {len(self._shares)}.")
        self._shares, self._length = list(state["shares"]), state["batches"]


def _above_one(batch_size: int, shares: Sequence[float]) -> list[float]:
    """What is left of the shares when every replica has got one sample."""
    left = [max(batch_size * share - 1, 0.0) for share in shares]
    return left if any(left) else [1.0] * len(shares)


def _within(sizes: Sequence[int], limits: Sequence[int | None]) -> list[int]:
    """Give what is above a replica's limit to those that have room; what nobody has room for stays where it is."""
    kept = [size if limit is None else min(size, limit) for size, limit in zip(sizes, limits, strict=True)]
    excess = sum(sizes) - sum(kept)
    while excess:
        room = [
            index for index, limit in enumerate(limits) if kept[index] and (limit is None or kept[index] < limit)
        ] or [index for index in range(len(kept)) if kept[index] < sizes[index]]
        smallest = min(room, key=lambda index: kept[index] / sizes[index])
        kept[smallest] += 1
        excess -= 1
    return kept


def _ms(seconds: Sequence[float]) -> str:
    return " and ".join(f"{1000 * value:.1f}" for value in seconds) + " ms"

"""The controller of `balance="auto"`, which follows measured times, and its limits from the memory of the devices."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any

import torch

from lightning_ddp_ext._devices import available_memory, memory_statistics, restart_peak
from lightning_ddp_ext.batches.chunk_sizes import limited_chunks, proportional_chunks

TYPICAL = 0.25  # quantile of the times in a window: other processes make batches slower, never faster
WINDOW = 7  # batches behind each decision: shorter averages followed single slow batches
LONGEST_WINDOW = 112
SHOWN = 5  # batches that show a large change of speed
LEAST = 0.015  # part of the time of a batch that a move has to save
CERTAINTY = 2.0  # standard errors of the times that a move has to save
MOST = 0.2  # of the time of a batch, which a move may save however uncertain that is
FAR = 0.10  # more imbalance than was accepted, from which the last batches decide, however long the window is
SUBSTANTIAL = 0.25  # of a chunk: by smaller changes, noise would look like a fixed time
LEAST_GAIN = 0.3  # of the expected gain, for which a move is kept
MOST_FIXED = 0.6  # of a replica's time that is taken to be independent of its samples


@dataclass(frozen=True, slots=True)
class Decision:
    """Chunk sizes before and after a decision of the controller, and the measurement behind it in words."""

    before: list[int]
    after: list[int]
    reason: str
    unit: str = "samples"

    def __str__(self) -> str:
        before, after = (", ".join(map(str, sizes)) for sizes in (self.before, self.after))
        change = f"stays at {after}" if before == after else f"from {before} to {after}"
        return f"{change} {self.unit}, because {self.reason}"


def divide_by_shares(
    batch_size: int, shares: Sequence[float], limits: Sequence[int | None], least: int = 1
) -> list[int]:
    """Divide a batch by shares, with at least `least` samples in each chunk if there are enough, within limits."""
    if batch_size < least * len(shares):
        return proportional_chunks(batch_size, shares)
    above = [max(batch_size * share - least, 0.0) for share in shares]
    rest = proportional_chunks(batch_size - least * len(shares), above if any(above) else [1.0] * len(shares))
    return limited_chunks([least + chunk for chunk in rest], limits)


@dataclass(frozen=True, slots=True)
class _Position:
    """Shares with the chunk sizes, times and imbalance that were measured with them."""

    shares: list[float]
    sizes: list[int]
    times: list[float]
    imbalance: float
    expected: float  # time of the slowest replica after the move from this position


def _quantiles(window: Sequence[Sequence[float]], fraction: float) -> list[float]:
    return [sorted(column)[int(fraction * len(column))] for column in zip(*window, strict=True)]


def _find_slow(window: Sequence[Sequence[float]], threshold: float) -> int | None:
    """Return the replica whose imbalance is above a threshold in lower quartiles and in medians, if it is the same."""
    slowest = set()
    for fraction in (TYPICAL, 0.5):
        times = _quantiles(window, fraction)
        if max(times) <= (1 + threshold) * fmean(times):
            return None
        slowest.add(times.index(max(times)))
    return slowest.pop() if len(slowest) == 1 else None


def _error(window: Sequence[Sequence[float]]) -> float:
    """Return the relative standard error of the difference of two lower quartiles.

    Of a normal distribution, the quartiles of `n` values have the standard error 1.36 s / sqrt(n), and the median is
    0.67 s above the lower quartile: H. Cramer, Mathematical Methods of Statistics, section 28.5.
    """
    quartiles, medians = _quantiles(window, TYPICAL), _quantiles(window, 0.5)
    spreads = [(median / quartile - 1) / 0.67 for median, quartile in zip(medians, quartiles, strict=True)]
    return 1.36 * math.hypot(*spreads) * math.sqrt(2 / len(spreads) / len(window))


def _level(batch_size: int, fixed: Sequence[float], per_sample: Sequence[float]) -> list[float]:
    """Return the shares with which replicas of these times take equally long; none if no shares can do that."""
    shares = [0.0] * len(fixed)
    busy = list(range(len(fixed)))
    while busy:
        rate = sum(1 / per_sample[index] for index in busy)
        time = (batch_size + sum(fixed[index] / per_sample[index] for index in busy)) / rate
        slow = [index for index in busy if fixed[index] >= time]
        if not slow:
            break
        busy = [index for index in busy if index not in slow]
    for index in busy:
        shares[index] = (time - fixed[index]) / per_sample[index] / batch_size
    return shares


class BalanceController:
    """Finds the shares with which all replicas take equally long for a batch.

    The imbalance is the time of the slowest replica relative to the mean, less 1, in the lower quartiles of a window of
    batches. A replica is taken to need a fixed time and a time per sample; a move shows how long the fixed time is.
    Windows grow while nothing moves, and a move that gains little is undone, for longer each time.
    Every replica keeps at least `least_samples`, since its speed could not be measured without any.
    """

    def __init__(self, num_replicas: int, noun: str = "replica", unit: str = "samples") -> None:
        self._noun, self._unit = noun, unit  # in reasons
        self.shares = [1.0 / num_replicas] * num_replicas
        self.limits: list[int | None] = [None] * num_replicas  # most samples that each replica has memory for
        self.least_samples = 1  # of a replica; batch normalisation needs 2
        self._sizes: list[int] = []  # of the batches in the window
        self._window: deque[list[float]] | None = None  # None before the first batch of these sizes
        self._length = WINDOW
        self._fixed = [0.0] * num_replicas  # seconds of each replica for a batch of no samples
        self._accepted = 0.0  # imbalance that was found acceptable, or unavoidable
        self._previous: _Position | None = None  # before the last move
        self._is_settled = False
        self._smaller = 0  # batches in a row below the full size
        self._batches = 0  # that were measured
        self._retry_at = 0  # number of the batch until which nothing moves, since the last move gained too little
        self._pause = WINDOW  # batches until a retry

    def split_sizes(self, batch_size: int) -> list[int]:
        """Divide a batch by the current shares, within the limits as far as other replicas have room."""
        return divide_by_shares(batch_size, self.shares, self.limits, self.least_samples)

    def observe(self, sizes: Sequence[int], seconds: Sequence[float]) -> Decision | None:
        """Add the chunk sizes and times of a training batch; return a decision if one was made."""
        sizes = list(sizes)
        self._smaller = self._smaller + 1 if sum(sizes) < sum(self._sizes) else 0
        if 0 < self._smaller < WINDOW or not all(sizes):
            return None  # the last batch of an epoch, or one that could not be divided by the shares
        if sizes != self._sizes:
            if self._sizes:
                self._length, self._retry_at = WINDOW, 0
            self._sizes = sizes
            self._previous = None  # measured with other batches
            self._window = None
        if self._window is None:
            self._window = deque()  # without this batch: the first of a size allocates memory and chooses kernels
            return None
        self._window.append(list(seconds))
        self._batches += 1
        recent = self._changed()
        if recent is not None:
            self._length, self._retry_at = WINDOW, 0
            self._window = deque(recent)
        if len(self._window) < self._length:
            return None
        window = self._window
        decision = self._decide(window)
        if len(window) >= LONGEST_WINDOW:  # it changes little with each batch, so the next decision can wait
            self._window = None if self._window is None else deque(islice(window, WINDOW, None))
        return decision

    def _changed(self) -> list[list[float]] | None:
        """Return the last batches if they show a large change of speed, which need not wait for a whole window."""
        if self._window is None or self._previous is not None:  # a move is judged by a whole window
            return None
        # The fewer the batches, the more likely is a series of slow ones.
        for number, part, quantile in ((SHOWN, 1.0, 0.95), (4 * WINDOW, 0.75, 0.75)):
            earlier, last = list(self._window)[:-number], list(self._window)[-number:]
            slow = _find_slow(last, self._accepted + FAR)
            if len(earlier) < WINDOW or slow is None:
                continue
            before, now = ([one[slow] / fmean(one) for one in batches] for batches in (earlier, last))
            usual = sorted(before)[int(quantile * len(before))]
            if sum(ratio > usual for ratio in now) >= part * number:
                return last
        return None

    def _decide(self, window: Sequence[Sequence[float]]) -> Decision | None:
        times = _quantiles(window, TYPICAL)
        slowest = max(times)
        imbalance = slowest / fmean(times) - 1
        previous, self._previous = self._previous, None
        if previous is not None:
            self._learn(previous, times)
        # A move that shortened the batch is kept even if the ratio rose, and one that lowered the ratio is kept even
        # if all replicas became slower: the machine may have become busier. A small part of the gain may be noise.
        if (
            previous is not None
            and slowest > max(previous.times) - LEAST_GAIN * (max(previous.times) - previous.expected)
            and imbalance > (1 - LEAST_GAIN) * previous.imbalance
        ):
            self._pause *= 4
            self._retry_at = self._batches + self._pause
            self._accepted = previous.imbalance
            self._fixed = [0.0] * len(times)
            return self._move(
                previous.shares,
                f"the last change gained little: the slowest {self._noun} took {_ms([max(previous.times)])} before it"
                f" and takes {_ms([slowest])} now, {previous.imbalance:.0%} and {imbalance:.0%} longer than the mean",
            )
        per_sample = [(time - fixed) / size for time, fixed, size in zip(times, self._fixed, self._sizes, strict=True)]
        shares = _level(sum(self._sizes), self._fixed, per_sample)
        sizes = divide_by_shares(sum(self._sizes), shares, self.limits, self.least_samples)
        expected = max(fixed + size * one for fixed, size, one in zip(self._fixed, sizes, per_sample, strict=True))
        least = min(max(LEAST, CERTAINTY * _error(window)), MOST)
        if self._batches < self._retry_at or slowest - expected < least * slowest:
            self._accepted = imbalance
            return self._settle(f"the slowest {self._noun} takes {imbalance:.0%} longer than the mean ({_ms(times)})")
        self._previous = _Position(self.shares, self._sizes, times, imbalance, expected)
        reason = f"{self._noun} {times.index(slowest)} takes {imbalance:.0%} longer than the mean"
        return self._move(shares, f"{reason} ({_ms(times)}, lower quartiles of {len(window)} batches)")

    def _learn(self, previous: _Position, times: Sequence[float]) -> None:
        """Learn the fixed time of each replica whose time rose or fell with its samples."""
        for index, (before, now) in enumerate(zip(previous.times, times, strict=True)):
            samples = self._sizes[index] - previous.sizes[index]
            if samples * (now - before) > 0 and abs(samples) >= SUBSTANTIAL * previous.sizes[index]:
                fixed = now - self._sizes[index] * (now - before) / samples
                self._fixed[index] = min(max(fixed, 0.0), MOST_FIXED * now)

    def _move(self, shares: list[float], reason: str) -> Decision:
        before = self._sizes
        self.shares, self._is_settled = shares, False
        self._sizes = self.split_sizes(sum(before))
        self._window = None
        return Decision(before, self._sizes, reason, self._unit)

    def _settle(self, reason: str) -> Decision | None:
        self._length = min(2 * self._length, LONGEST_WINDOW)
        was_settled, self._is_settled = self._is_settled, True
        return None if was_settled else Decision(self._sizes, self._sizes, reason, self._unit)

    def state_dict(self) -> dict[str, Any]:
        """Return the shares and the length of the window, in plain numbers for a checkpoint."""
        return {"shares": list(self.shares), "batches": self._length, "fixed": list(self._fixed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, which must have as many shares as there are replicas."""
        self.shares, self._length, self._fixed = list(state["shares"]), state["batches"], list(state["fixed"])


def _ms(seconds: Sequence[float]) -> str:
    return " and ".join(f"{1000 * value:.1f}" for value in seconds) + " ms"


_USABLE = 0.9  # of the available memory: allocators fragment, and batches differ


def count_fitting(device: torch.device, largest_chunk: int) -> int | None:
    """Return how many samples fit an accelerator between two batches, by the peak of the largest chunk; else None."""
    memory = memory_statistics(device)
    held = memory.memory_allocated(device)  # between batches: parameters, gradients, optimizer state
    peak = memory.max_memory_allocated(device)
    if not largest_chunk or peak <= held:
        return None
    per_sample = (peak - held) / largest_chunk
    return max(0, int((_USABLE * available_memory(device) - held) / per_sample))


class PeakMemory:
    """Measures the peaks of windows of training batches, without evaluation between them."""

    def __init__(self) -> None:
        # Chunk sizes of the batches since the peaks of memory were restarted; None if other batches have peaks as well.
        self._measured: list[Sequence[int]] | None = None

    def observe(self, sizes: Sequence[int], devices: Sequence[torch.device]) -> list[int | None] | None:
        """Add the chunk sizes of a training batch; at the end of a window, return how many samples fit each device."""
        limits: list[int | None] | None = None
        if self._measured is not None:
            self._measured.append(sizes)
            if len(self._measured) < WINDOW:
                return None
            largest = map(max, zip(*self._measured, strict=True))
            limits = [*map(count_fitting, devices, largest)]
        for device in devices:
            restart_peak(device)
        self._measured = []
        return limits

    def forget(self) -> None:
        """Ignore the peaks so far, because the devices have computed other batches than training batches."""
        self._measured = None

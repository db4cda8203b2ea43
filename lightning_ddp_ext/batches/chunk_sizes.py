"""Rules that divide a batch into chunks, and the options that choose one. Pure arithmetic."""

import functools
import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from lightning_ddp_ext._validation import check_integer

Balance = Literal["even", "auto"]

_HALVINGS = 50  # of an interval of limits, which then has the precision of a float


class ChunkRule:
    """The checked options `gpu0_batch_size`, `split` and `balance`, at most one of which is given."""

    def __init__(self, gpu0_batch_size: int | None, split: Sequence[float] | None, balance: Balance | None) -> None:
        given = {"gpu0_batch_size": gpu0_batch_size, "split": split, "balance": balance}
        chosen = [f"`{name}={value!r}`" for name, value in given.items() if value is not None]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} exclude each other. Keep one of them.")
        if gpu0_batch_size is not None:
            remedy = "Use 0 to keep the first device free of samples."
            check_integer("gpu0_batch_size", gpu0_batch_size, remedy=remedy)
        if split is not None:
            _check_proportions(split)
        if balance is not None and not (isinstance(balance, str) and balance in ("even", "auto")):
            raise ValueError(f'`balance` must be "even" or "auto", got {balance!r}. Use `split` for fixed proportions.')
        self.is_free = not chosen
        self.is_auto = balance == "auto"
        self.first = gpu0_batch_size  # most samples of the first chunk; None for no limit
        self._proportions = None if split is None else list(split)
        self.given = {**given, "split": self._proportions}  # the options by name

    def __str__(self) -> str:
        if self._proportions is not None:
            return f"in proportions of {':'.join(f'{part:g}' for part in self._proportions)}"
        if self.first is not None:
            return f"evenly, but at most {self.first} for the first"
        return "evenly"

    def check_number(self, number: int, noun: str = "device") -> None:
        """Check that there are as many proportions as devices, or ranks."""
        if self._proportions is not None and len(self._proportions) != number:
            nouns = noun if number == 1 else f"{noun}s"
            raise ValueError(
                f"`split={self._proportions}` has {len(self._proportions)} entries for {number} {nouns}."
                f" Give one proportion per {noun}."
            )

    @property
    def limits(self) -> tuple[int | None, ...]:
        """Most samples of the first chunks; the others have no limit."""
        return () if self.first is None else (self.first,)

    def divide(self, batch_size: int, number: int) -> list[int]:
        """Divide a batch as the options say; evenly if they leave that to a controller."""
        if self._proportions is not None:
            return proportional_chunks(batch_size, self._proportions)
        if self.first is not None:
            return first_limited_chunks(batch_size, number, self.first)
        return even_chunks(batch_size, number)


def _check_proportions(split: object) -> None:
    if isinstance(split, str) or not isinstance(split, Sequence):
        raise TypeError(f"`split` must be a sequence of numbers, got {split!r}. Use for example [2, 3, 3].")
    numbers = all(isinstance(part, int | float) and not isinstance(part, bool) for part in split)
    if not numbers or any(not 0 <= part < math.inf for part in split) or not 0 < sum(split) < math.inf:
        raise ValueError(
            f"`split` must hold non-negative numbers, not all zero, got {list(split)!r}. Use for example [2, 3, 3]."
        )


def proportional_chunks(batch_size: int, proportions: Sequence[float]) -> list[int]:
    """Divide a batch in given proportions by largest remainder (Hamilton's method), within one sample of each share."""
    return list(_proportional_chunks(batch_size, tuple(proportions)))


@functools.lru_cache(maxsize=100)
def _proportional_chunks(batch_size: int, proportions: tuple[float, ...]) -> list[int]:
    # Fractions, because a remainder that floats round the other way would move a sample between runs.
    exact = [Fraction(proportion) for proportion in proportions]
    shares = [batch_size * proportion / sum(exact) for proportion in exact]
    chunks = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: (chunks[index] - shares[index], index))
    for index in by_remainder[: batch_size - sum(chunks)]:
        chunks[index] += 1
    return chunks


def even_chunks(batch_size: int, num_chunks: int) -> list[int]:
    """Divide a batch evenly; remainders go to the lowest indices."""
    share, remainder = divmod(batch_size, num_chunks)
    return [share + (index < remainder) for index in range(num_chunks)]


def first_limited_chunks(batch_size: int, num_chunks: int, first: int) -> list[int]:
    """Give the first replica at most `first` samples and at most an even share; divide the rest evenly."""
    if num_chunks == 1:
        return [batch_size]
    first_chunk = min(first, -(-batch_size // num_chunks))
    return [first_chunk, *even_chunks(batch_size - first_chunk, num_chunks - 1)]


def deal_by_cost(sizes: Sequence[int], costs: Sequence[float], first: int | None = None) -> list[list[int]]:
    """Return the positions of the samples of chunks whose costs are in proportion to `sizes`.

    The first chunk gets at most `first` samples.
    Each sample, the costliest first, is dealt to the chunk that then has the least cost in proportion to its size (R.
    L. Graham, "Bounds on multiprocessing timing anomalies", 1969). Samples of equal costs give chunks of these sizes.
    """
    chunks: list[list[int]] = [[] for _ in sizes]
    totals = [0.0] * len(sizes)
    takers = [index for index, size in enumerate(sizes) if size]

    def proportion(index: int) -> tuple[float, float]:
        return (totals[index] + cost) / sizes[index], (len(chunks[index]) + 1) / sizes[index]

    for position in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        cost = costs[position]
        chosen = min(takers, key=proportion)
        chunks[chosen].append(position)
        totals[chosen] += cost
        if chosen == 0 and len(chunks[0]) == first and len(takers) > 1:
            takers.remove(0)
    return [sorted(chunk) for chunk in chunks]


def deal_by_padded_length(sizes: Sequence[int], lengths: Sequence[float], first: int | None = None) -> list[list[int]]:
    """Return the positions of the samples of chunks that are in proportion to `sizes` when padded to their longest one.

    The first chunk gets at most `first` samples, the shortest ones.
    Samples of similar length come together. The largest chunk is as small as it can be if chunks with a size, which
    have a sample, have the same size; otherwise nearly so.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    ascending = [lengths[position] for position in order] if any(lengths) else [1.0] * len(order)
    low, high = 0.0, sum(ascending[-1:]) * len(order)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _padded_ends(sizes, ascending, middle, first) is None else (low, middle)
    ends = _padded_ends(sizes, ascending, high, first) or []
    return [sorted(order[start:end]) for start, end in pairwise([0, *ends])]


def _padded_ends(sizes: Sequence[int], ascending: Sequence[float], limit: float, first: int | None) -> list[int] | None:
    """Return the ends of chunks as long as a limit for each unit of `sizes` allows; None if it is too low."""
    ends = [0]

    def padded_area(end: int) -> float:
        return (end - ends[-1]) * ascending[end - 1]

    for index, size in enumerate(sizes):
        start = end = ends[-1]
        if size:
            last = len(ascending) - sum(map(bool, sizes[index + 1 :]))
            if index == 0 and first is not None and any(sizes[1:]):
                last = min(last, first)
            end = bisect_right(range(last + 1), limit * size, start + 1, last + 1, key=padded_area) - 1
            if end == start:
                return None
        ends.append(end)
    return ends[1:] if ends[-1] == len(ascending) else None


def avoid_single_samples(chunks: Sequence[int], limits: Sequence[int | None] = ()) -> list[int]:
    """Return sizes near the given ones without a chunk of one sample, if that is possible within the limits of chunks.

    A single sample gets a second one from the largest chunk, if more than one stays there. Otherwise it goes to the
    smallest chunk with room, and if there is none, its chunk takes all samples of another.
    """
    sizes = list(chunks)
    most = [*limits, *[None] * (len(sizes) - len(limits))]

    def has_room(index: int, number: int = 1) -> bool:
        limit = most[index]
        return limit is None or sizes[index] + number <= limit

    for index in range(len(sizes)):
        others = [other for other, size in enumerate(sizes) if size and other != index]
        if sizes[index] != 1 or not others:
            continue
        largest = max(others, key=sizes.__getitem__)
        takers = [other for other in others if has_room(other)]
        if sizes[largest] > 2 and has_room(index):
            source, target, number = largest, index, 1
        elif takers:
            source, target, number = index, min(takers, key=sizes.__getitem__), 1
        elif has_room(index, sizes[largest]):
            source, target, number = largest, index, sizes[largest]
        else:
            continue
        sizes[source] -= number
        sizes[target] += number
    return sizes


def limited_chunks(sizes: Sequence[int], limits: Sequence[int | None]) -> list[int]:
    """Move samples above a limit to chunks below theirs; samples that fit nowhere stay in their chunk."""
    kept = [size if limit is None else min(size, limit) for size, limit in zip(sizes, limits, strict=True)]
    for _ in range(sum(sizes) - sum(kept)):
        room = [
            index for index, limit in enumerate(limits) if kept[index] and (limit is None or kept[index] < limit)
        ] or [index for index in range(len(kept)) if kept[index] < sizes[index]]
        kept[min(room, key=lambda index: kept[index] / sizes[index])] += 1
    return kept

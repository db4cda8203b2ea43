"""Rules that divide a batch into chunks, and counters of the samples in them. Pure arithmetic."""

from collections.abc import Hashable, Sequence
from fractions import Fraction


def proportional_chunks(batch_size: int, proportions: Sequence[float]) -> list[int]:
    """Divide a batch in given proportions by largest remainder (Hamilton's method), within one sample of each share."""
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


def merge_single_samples(chunks: Sequence[int]) -> list[int]:
    """Merge each chunk of one sample into the next chunk that has samples, or else into the previous one."""
    merged = list(chunks)
    for index, size in enumerate(merged):
        if size != 1:
            continue
        following = [other for other in range(index + 1, len(merged)) if merged[other]]
        previous = [other for other in range(index - 1, -1, -1) if merged[other]]
        for neighbour in [*following, *previous][:1]:
            merged[neighbour] += 1
            merged[index] = 0
    return merged


def limited_chunks(sizes: Sequence[int], limits: Sequence[int | None]) -> list[int]:
    """Move samples above a limit to chunks below theirs; samples that fit nowhere stay in their chunk."""
    kept = [size if limit is None else min(size, limit) for size, limit in zip(sizes, limits, strict=True)]
    for _ in range(sum(sizes) - sum(kept)):
        room = [
            index for index, limit in enumerate(limits) if kept[index] and (limit is None or kept[index] < limit)
        ] or [index for index in range(len(kept)) if kept[index] < sizes[index]]
        kept[min(room, key=lambda index: kept[index] / sizes[index])] += 1
    return kept


class SampleCounters:
    """Recognises numbers that each part of a batch has raised by its number of samples.

    With parts of one sample, a counter of samples looks like a counter of steps: earlier steps decide.
    """

    def __init__(self) -> None:
        self._known: set[Hashable] = set()

    def recognise(self, key: Hashable, raised: Sequence[float], sizes: Sequence[float]) -> bool:
        """Return True if the number called `key` counts samples, given by how much each part has raised it."""
        if list(raised) != list(sizes) or (set(sizes) == {1} and key not in self._known):
            return False
        self._known.add(key)
        return True

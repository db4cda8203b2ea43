"""Batches of loaders with their numbers of samples."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from lightning_ddp_ext._compat.torch import iterate_counting, samples_of
from lightning_ddp_ext._lightning import CombinedLoader
from lightning_ddp_ext.batches.sample_counts import count_drawn, mean_count

Fetched = tuple[tuple[Any, int, int], float | None]
"""A batch with its index and the index of its loader, and its number of samples, None if they cannot be counted."""


class CountedLoader:
    """Iterates over a loader and adds the number of samples of each batch, or None if unknown, to a list."""

    def __init__(self, loader: Any, counts: list[int | None]) -> None:
        self._loader = loader
        self._counts = counts

    def __iter__(self) -> Iterator[Any]:
        batches = iterate_counting(self._loader, count_drawn)  # not lazily, since loaders draw their seeds here

        def note_count(batch: Any) -> Any:
            self._counts.append(samples_of(batches))
            return batch

        return map(note_count, batches)

    def __len__(self) -> int:
        return len(self._loader)


class CountedBatches:
    """Iterates over loaders in a mode of Lightning's `CombinedLoader`, and counts the samples of each batch.

    A `prefetcher` fetches at most `limit` batches ahead of their use.
    """

    def __init__(self, combined: CombinedLoader, prefetcher: Any = None, limit: int | None = None) -> None:
        self._combined = combined
        self._prefetcher = prefetcher
        self._limit = limit
        self._counts: list[int | None] = []  # of the batches that loaders have contributed to the last fetch
        combined.flattened = [CountedLoader(loader, self._counts) for loader in combined.flattened]

    def __iter__(self) -> Iterator[Fetched]:
        steps: Any = iter(self._combined)

        def fetch() -> Fetched:
            self._counts.clear()
            step = next(steps)
            return step, mean_count(self._counts)

        if self._prefetcher is None:
            return iter(fetch, None)  # until `fetch` raises StopIteration
        self._prefetcher.begin(self._limit)
        return iter(partial(self._prefetcher.next, fetch), None)

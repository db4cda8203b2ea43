"""Loaders of one rank that count the samples of each batch, and the participation of ranks in steps."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loaders import combination_mode
from lightning_ddp_ext._compat.torch import iterate_counting, samples_of
from lightning_ddp_ext.batches.sample_counts import count_drawn, mean_count

LOOKAHEAD = 2  # batches that are fetched ahead at most: one by the loop, one to know if this rank has a next batch


@dataclass(frozen=True, slots=True)
class StepParticipation:
    """The ranks that have a batch in a step."""

    active: tuple[int, ...]  # in ascending order
    is_shadow: bool  # this rank has no batch
    is_uneven: bool  # some rank has no batch


class FetchedBatch(NamedTuple):
    """The samples of a batch, and the ranks that have a batch in its step."""

    samples: float | None  # None if they cannot be counted
    participation: StepParticipation | None = None  # None if every rank has a batch
    shares: Any = None  # the `SharedBatch` of `shares/table.py`, if ranks share the batch
    position: tuple[int, int] = (0, 0)  # index of the batch and of its loader; set in lockstep
    is_stand_in: bool = False  # hooks see a copy of this batch in shadow steps


class CountedCombinedLoader(CombinedLoader):
    """A `CombinedLoader` that counts the samples of each batch; `fetched` has an entry for each one not begun yet."""

    prefetcher: Any = None  # the `Prefetcher` of `resume/prefetching.py` that fetches batches before they are needed
    fetch_limit: int | None = None  # number of batches to fetch, if it is not the length

    def __init__(self, iterables: Any, mode: Any) -> None:
        super().__init__(iterables, mode)
        # Bounded, because a `training_step` that fetches its batches itself takes no entries.
        self.fetched: deque[FetchedBatch] = deque(maxlen=LOOKAHEAD)
        self._counts: list[int | None] = []  # of the batches that loaders have contributed to the last fetch

    @override
    def __iter__(self) -> "CountedCombinedLoader":
        self.stop_prefetching()
        self.fetched.clear()
        loaders = self.flattened
        self.flattened = [CountedLoader(loader, self._counts) for loader in loaders]
        try:
            super().__iter__()
        finally:
            self.flattened = loaders  # Lightning and users look at these
        if self.prefetcher is not None:
            self.prefetcher.begin(sized_len(self) if self.fetch_limit is None else self.fetch_limit)
        return self

    @override
    def __next__(self) -> tuple[Any, int, int]:
        step, samples = self._fetch_next() if self.prefetcher is None else self.prefetcher.next(self._fetch_next)
        self.fetched.append(FetchedBatch(samples))
        return step

    def _fetch_next(self) -> tuple[tuple[Any, int, int], float | None]:
        self._counts.clear()
        step = super().__next__()
        return step, mean_count(self._counts)

    def stop_prefetching(self) -> None:
        """Drop the batches that were fetched ahead."""
        if self.prefetcher is not None:
            self.prefetcher.close()

    @override
    def reset(self) -> None:
        self.stop_prefetching()  # before its workers end
        super().reset()
        self.fetched.clear()


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


def combine_counted(given: Any, is_training: bool) -> CombinedLoader:
    """Combine the loaders of a loop as Lightning does; keep a class that the user has derived from `CombinedLoader`."""
    if isinstance(given, CombinedLoader) and type(given) is not CombinedLoader:
        return given
    return CountedCombinedLoader(*iterables_and_mode(given, is_training))


def iterables_and_mode(given: Any, is_training: bool) -> tuple[Any, Any]:
    """Return the arguments with which Lightning combines the loaders of a loop."""
    if isinstance(given, CombinedLoader):
        return given.iterables, combination_mode(given)
    return given, "max_size_cycle" if is_training else "sequential"

"""Numbers of samples per batch, and means over ranks that are weighted by them."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loaders import combination_mode
from lightning_ddp_ext._compat.torch import iterate_counting, samples_of
from lightning_ddp_ext._devices import widest_float
from lightning_ddp_ext.batches.splitting import count_samples, may_be_one_sample
from lightning_ddp_ext.errors import BatchSplitError

LOOKAHEAD = 2  # at most so many batches are fetched early: one by the loop, one to know if this rank has a next batch


class CountedLoader:
    """Iterates over a loader and adds the number of samples of each batch, or None if unknown, to a list."""

    def __init__(self, loader: Any, counts: list[int | None]) -> None:
        self._loader = loader
        self._counts = counts

    def __iter__(self) -> Iterator[Any]:
        batches = iterate_counting(self._loader, count_drawn)  # not lazily, since loaders draw their seeds here

        def count(batch: Any) -> Any:
            self._counts.append(samples_of(batches))
            return batch

        return map(count, batches)

    def __len__(self) -> int:
        return len(self._loader)


def count_drawn(samples: Any, batch: Any, batch_size: int | None) -> int | None:
    """Return the number of samples that a collate function has received, see `iterate_counting`."""
    if not isinstance(samples, list):
        return None  # `__getitems__` of the dataset may return a table or a tuple of columns
    if len(samples) == 1 and batch is samples[0]:
        return None  # nothing was collated: the dataset has made the batch
    # The only sample of a last batch was collated as the samples of the batches before it.
    if batch_size == 1 and len(samples) == 1 and not may_be_one_sample(batch):
        return None
    # Datasets return None for a broken sample, which the collate function skips.
    return sum(sample is not None for sample in samples) or None


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
    position: tuple[int, int] = (0, 0)  # the indices of the batch and of its loader, in lockstep
    is_stand_in: bool = False  # hooks see a copy of this batch in shadow steps


CountedFetch = tuple[tuple[Any, int, int], float | None]
"""A batch with its index and the index of its loader, and its number of samples."""


class FetchAhead(Protocol):
    """Fetches batches before they are needed."""

    def begin(self, limit: int | None) -> None:
        """Begin an iteration of at most `limit` batches."""

    def next(self, fetch: Callable[[], CountedFetch]) -> CountedFetch:
        """Return the result of the next call of `fetch`."""

    def close(self) -> None:
        """End the iteration."""


class CountedCombinedLoader(CombinedLoader):
    """A `CombinedLoader` that counts the samples of each batch; `fetched` has an entry for each one not begun yet."""

    prefetcher: FetchAhead | None = None
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
        batch, samples = self._fetch_next() if self.prefetcher is None else self.prefetcher.next(self._fetch_next)
        self.fetched.append(FetchedBatch(samples))
        return batch

    def _fetch_next(self) -> CountedFetch:
        self._counts.clear()
        batch = super().__next__()
        return batch, mean_count(self._counts)

    def stop_prefetching(self) -> None:
        """Drop the batches that were fetched ahead."""
        if self.prefetcher is not None:
            self.prefetcher.close()

    @override
    def reset(self) -> None:
        self.stop_prefetching()  # before its workers end
        super().reset()
        self.fetched.clear()


def mean_count(counts: Sequence[int | None]) -> float | None:
    """Return the mean number of samples of the loaders that contribute to a batch, or None if one is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) / len(known) if counts and len(known) == len(counts) else None


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


class BatchSamples:
    """Number of samples in the current batch: the loader has drawn them, or tensors have them in `batch_dim`."""

    def __init__(self, batch_dim: int) -> None:
        self.problem = ""  # why the last batch has no count
        self.batch_dim = batch_dim
        self._drawn: float | None = None

    def describe_problem(self) -> str:
        """Return a message that the last batch has no count, with the remedy."""
        return (
            f'`weight_by="samples"` needs numbers of samples, and those of a batch cannot be counted: {self.problem}'
            " Pass a callable `weight_by`, which returns the weight of a batch, such as `len` for a list of samples, or"
            ' `weight_by="equal"` if batches are equally large on all ranks.'
        )

    def begin(self, drawn: float | None) -> None:
        """Begin a batch with the number of samples that the loader has drawn for it; None if that is unknown."""
        self._drawn = drawn

    def end(self) -> None:
        """End the batch, since the next step may fetch its batch itself."""
        self._drawn = None

    def weight(self, batch: Any) -> float:
        """Return the weight of the batch in a mean over ranks: its samples, or nan if they cannot be counted."""
        samples = self.count(batch)
        return math.nan if samples is None else samples

    def rounded(self, batch: Any) -> int | None:
        """Return `count` as an integer, because Lightning sums the counts in one dtype on all ranks."""
        samples = self.count(batch)
        return None if samples is None else round(samples)

    def count(self, batch: Any) -> float | None:
        """Return the number of samples drawn for the batch, else the size of its tensors; None if both are unknown."""
        if self._drawn is not None or isinstance(batch, Iterator):  # a step with `dataloader_iter` fetches its batch
            return self._drawn
        try:
            return float(count_samples(batch, self.batch_dim))
        except BatchSplitError as error:
            self.problem = error.problem
            return None


def sums_and_means(values: Tensor, weight: float | None, add_up: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sums and the weighted means of values over ranks in the widest type, with one reduction.

    If all weights are zero, or one is unknown (nan), average the ranks equally. A rank without values has the weight
    None, and is in no sum and no mean.
    """
    own = torch.zeros(2, len(values) + 1, dtype=widest_float(values.device), device=values.device)
    if weight is not None:
        own[0, :-1], own[0, -1] = values, 1.0
        # The loss of a batch without weight may be a mean over no samples, thus nan.
        own[1] = own[0] * weight if weight else 0.0
    totals = add_up(own)
    equal, weighted = totals[:, :-1] / totals[:, -1:]
    return totals[0, :-1], torch.where(totals[1, -1] > 0, weighted, equal)

"""Private names of torch's `DataLoader`, each with its reason. Checked on torch 2.13.0 and torchdata 0.11.0.

    DataLoader._get_iterator   a class that overrides it may look at batches before the caller does
    _BaseDataLoaderIter        what `iter(loader)` returns, also of torchdata's loader
      _collate_fn              what it hands samples to, here or in workers
      _next_data               returns the next batch as workers have sent it, and memory has been pinned

`tests/compat` fails when one moves.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from torch.utils.data import DataLoader

CountSamples = Callable[[Any, Any, int | None], int | None]

_MODULES = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")


class _CountedBatch(NamedTuple):
    """A batch on its way from a worker; torch pins the memory of both fields of a named tuple."""

    batch: Any
    samples: int | None


class _CountingCollate:
    """Adds the number of samples to the batch that a collate function makes of them; picklable if the function is."""

    def __init__(self, collate: Callable[[Any], Any], count: CountSamples, batch_size: int | None) -> None:
        self._collate = collate
        self._count = count
        self._batch_size = batch_size

    def __call__(self, samples: Any) -> _CountedBatch:
        batch = self._collate(samples)
        return _CountedBatch(batch, self._count(samples, batch, self._batch_size))


class _CountingIterator:
    """Mixed into an iterator of torch: takes the number of samples off each batch."""

    samples: int | None = None

    def _next_data(self) -> Any:
        batch, self.samples = super()._next_data()  # type: ignore[misc]
        return batch


@functools.cache
def _counting_class(kind: type) -> type:
    return type(kind.__name__, (_CountingIterator, kind), {})


def iterate_counting(loader: Any, count: CountSamples) -> Iterator[Any]:
    """Iterate over a loader so that `samples_of` knows how many samples were drawn for each batch.

    The count comes from the place where samples are handed to the collate function, in a worker if there are any, and
    travels with the batch. It is therefore right in any order, with workers that persist and batches fetched ahead.

    Args:
        loader: The loader.
        count: Picklable function that counts samples, from the argument and the result of the collate function and the
            size of the sampler's batches; None if it cannot.
    """
    given = vars(loader).get("collate_fn") if _has_torchs_iterator(loader) else None
    if given is None:
        return iter(loader)
    batch_size = getattr(loader.batch_sampler, "batch_size", None)
    loader.collate_fn = _CountingCollate(given, count, batch_size)  # read when an iterator is made, and never again
    try:
        batches: Any = iter(loader)
    finally:
        loader.collate_fn = given
    # Workers that persist keep their iterator, which may be from before.
    if isinstance(batches._collate_fn, _CountingCollate) and not isinstance(batches, _CountingIterator):
        batches.__class__ = _counting_class(type(batches))  # type: ignore[arg-type]
    return cast(Iterator[Any], batches)


def samples_of(batches: Iterator[Any]) -> int | None:
    """Return how many samples were drawn for the last batch of an iterator; None if that is not known."""
    return batches.samples if isinstance(batches, _CountingIterator) else None


def _has_torchs_iterator(loader: Any) -> bool:
    """Return True if a loader collates samples, and torch's own iterator hands batches to the caller."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return False
    return all(getattr(type(loader), name).__module__ in _MODULES for name in ("__iter__", "_get_iterator"))

"""Loaders whose batches come with the number of samples that were drawn for them."""

from collections.abc import Iterator
from typing import Any

from lightning_ddp_ext._compat.torch_loaders import iterate_counting, samples_of
from lightning_ddp_ext.parallel.batches.arrays import may_be_one_sample


class CountedLoader:
    """Iterates over a loader, and adds the number of samples of each batch to a list.

    Args:
        loader: The loader.
        counts: The list; None is added for a batch whose samples the loader does not draw.
    """

    def __init__(self, loader: Any, counts: list[int | None]) -> None:
        self._loader = loader
        self._counts = counts

    def __iter__(self) -> Iterator[Any]:
        batches = iterate_counting(self._loader, count_drawn)  # at once, as loaders draw their seeds here

        def count(batch: Any) -> Any:
            self._counts.append(samples_of(batches))
            return batch

        return map(count, batches)

    def __len__(self) -> int:
        return len(self._loader)


def count_drawn(samples: Any, batch: Any, batch_size: int | None) -> int | None:
    """Return the number of samples that a collate function was handed, see `iterate_counting`."""
    if not isinstance(samples, list):
        return None  # `__getitems__` of the dataset may return a table or a tuple of columns
    if len(samples) == 1 and batch is samples[0]:
        return None  # nothing was collated: the dataset has made the batch
    # The only sample of a last batch was collated as the samples of the batches before it.
    if batch_size == 1 and len(samples) == 1 and not may_be_one_sample(batch):
        return None
    # Datasets return None for a broken sample, which the collate function skips.
    return sum(sample is not None for sample in samples) or None

"""Loaders whose batches come with the number of samples that were drawn for them."""

from collections.abc import Iterator
from typing import Any

from lightning_ddp_ext._compat.torch_loaders import iterate_counting, samples_of


class CountedLoader:
    """Iterates over a loader, and adds the number of samples of each batch to a list.

    Args:
        loader: The loader.
        counts: The list; None is added for a batch whose samples the loader does not draw.
    """

    def __init__(self, loader: Any, counts: list[int | None]) -> None:
        self._loader = loader
        self._counts = counts
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> "CountedLoader":
        self._batches = iterate_counting(self._loader)
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._counts.append(samples_of(self._batches))
        return batch

    def __len__(self) -> int:
        return len(self._loader)

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

    def __iter__(self) -> Iterator[Any]:
        batches = iterate_counting(self._loader)  # at once, as loaders draw their seeds here

        def count(batch: Any) -> Any:
            self._counts.append(samples_of(batches))
            return batch

        return map(count, batches)

    def __len__(self) -> int:
        return len(self._loader)

"""Numbers of samples per batch, and means over ranks that are weighted by them."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext._devices import widest_float
from lightning_ddp_ext.batches.containers import is_array, walk
from lightning_ddp_ext.batches.splitting import count_samples
from lightning_ddp_ext.errors import BatchSplitError, WarnOnce


class BatchSamples:
    """Number of samples in the current batch: the loader has drawn them, or tensors have them in `batch_dim`."""

    def __init__(self, batch_dim: int) -> None:
        self.problem = ""  # why the last batch has no count
        self.batch_dim = batch_dim
        self._drawn: float | None = None
        self._warn = WarnOnce()

    def describe_problem(self) -> str:
        """Return a message that the last batch has no count, with the remedy."""
        return (
            f'`weight_by="samples"` needs numbers of samples, and those of a batch cannot be counted: {self.problem}'
            " Pass a callable `weight_by`, which returns the weight of a batch, such as `len` for a list of samples, or"
            ' `weight_by="equal"` if batches are equally large on all ranks.'
        )

    def begin(self, drawn: float | None, batch: Any = None) -> None:
        """Begin a batch with the drawn samples, None if unknown or at its end; a batch that dropped some decides."""
        self._drawn = None
        kept = None if drawn is None or batch is None else self.count(batch)
        self._drawn = drawn
        if drawn is None or kept is None or kept >= drawn:
            return
        shapes = [getattr(part, "shape", ()) for part in walk(batch) if is_array(part)]
        if not shapes or any(drawn not in shape for shape in shapes):  # else samples may be in another dimension
            self._drawn = kept
            self._warn(
                f"the loader has drawn {drawn:g} samples for a batch of {kept:g} samples along `batch_dim="
                f"{self.batch_dim}`, so that the batch has weight {kept:g}. Ignore this if the collate function drops"
                " samples on purpose. If samples are in another dimension, set `batch_dim`."
            )

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

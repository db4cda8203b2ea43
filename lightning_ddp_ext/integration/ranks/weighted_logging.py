"""Values that `self.log` reduces over ranks as soon as they are logged, weighed by the batch of each rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_ddp_ext._compat.lightning_logging import unwatch_logging, watch_logging
from lightning_ddp_ext.integration.ranks.counted_loaders import BatchSamples


class WeightedLogging:
    """Makes the mean over ranks of a value that a step logs a weighted one, as that of the gradient.

    Args:
        trainer: The Trainer.
        samples: Knows how many samples a batch has, by which the mean of an epoch weighs.
    """

    def __init__(self, trainer: Trainer, samples: BatchSamples) -> None:
        self._trainer = trainer
        self._weight: float | None = None
        self._is_logging = False
        watch_logging(trainer, self._update, samples.rounded, samples.forget)

    def close(self) -> None:
        """Stop following what is logged."""
        unwatch_logging(self._trainer)

    @contextmanager
    def step(self, weight: float) -> Iterator[None]:
        """Weigh what the step of a LightningModule logs.

        Args:
            weight: Weight of this rank's batch; nan if it is not known.
        """
        self._weight = weight
        try:
            yield
        finally:
            self._weight = None

    def average(self, tensor: Tensor, add_up: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return the weighted mean over ranks of a value that a step is logging; None for any other.

        If all weights are zero, or one is not known, the mean weighs ranks equally.

        Args:
            tensor: The value.
            add_up: Adds a tensor up over the ranks.
        """
        if self._weight is None or not self._is_logging:
            return None
        equal = torch.stack([tensor.double(), tensor.new_ones((), dtype=torch.float64)])
        # The loss of a batch without weight may be a mean over nothing, thus nan.
        weighted = equal * self._weight if self._weight else torch.zeros_like(equal)
        totals, weights = add_up(torch.stack([weighted, equal], dim=1))
        mean, equal_mean = totals / weights
        return torch.where(weights[0] > 0, mean, equal_mean).to(tensor.dtype)

    def _update(self, key: str, metric: Any, proceed: Callable[[], None]) -> None:
        self._is_logging = True
        try:
            proceed()
        finally:
            self._is_logging = False

"""Values that `self.log` reduces over ranks as soon as they are logged, weighed by the batch of each rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_ddp_ext._compat.lightning_logging import unwatch_logging, watch_logging
from lightning_ddp_ext.integration.ranks.counted_loaders import BatchSamples
from lightning_ddp_ext.integration.ranks.reductions import sums_and_means


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

        Args:
            tensor: The value.
            add_up: Adds a tensor up over the ranks.
        """
        if self._weight is None or not self._is_logging:
            return None
        _, means = sums_and_means(tensor.detach().reshape(-1), self._weight, add_up)
        return means.reshape(tensor.shape).to(tensor.dtype)

    def _update(self, key: str, metric: Any, proceed: Callable[[], None]) -> None:
        self._is_logging = True
        try:
            proceed()
        finally:
            self._is_logging = False

"""The digits network on devices of different speed."""

import time

from torch import Tensor

from lightning_ddp_ext.demo.digits import DigitsCNN
from lightning_ddp_ext.parallel.workers import current_replica


class SlowedDigitsCNN(DigitsCNN):
    """The digits network, with replicas that sleep for a time per sample: devices of different speed, simulated.

    Args:
        milliseconds_per_sample: One number per replica.
        width: See `DigitsCNN`.
        learning_rate: See `DigitsCNN`.
    """

    def __init__(self, milliseconds_per_sample: list[float], width: int = 32, learning_rate: float = 2e-3) -> None:
        super().__init__(width, learning_rate)
        self.milliseconds_per_sample = list(milliseconds_per_sample)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the cross-entropy of a batch (images, labels), slowly."""
        time.sleep(len(batch[0]) * self.milliseconds_per_sample[current_replica() or 0] / 1000)
        return super().training_step(batch, batch_idx)

"""The digits network on devices of different speed."""

import time
from collections.abc import Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext.arguments import check_number
from lightning_ddp_ext.demo.digits import DigitsCNN
from lightning_ddp_ext.parallel.replicas.workers import current_replica

_LONGEST = 1000.0  # milliseconds
_REMEDY = "Use for example [3.0, 1.0], one number per replica."


class SlowedDigitsCNN(DigitsCNN):
    """The digits network, with replicas that sleep for a time per sample: devices of different speed, simulated.

    Args:
        milliseconds_per_sample: One number per replica.
        width: See `DigitsCNN`.
        learning_rate: See `DigitsCNN`.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.
        MisconfigurationException: When it is run, if there are more replicas than numbers.
    """

    def __init__(self, milliseconds_per_sample: list[float], width: int = 32, learning_rate: float = 2e-3) -> None:
        if isinstance(milliseconds_per_sample, str) or not isinstance(milliseconds_per_sample, Sequence):
            raise TypeError(
                f"`milliseconds_per_sample` must be a list of numbers, got {milliseconds_per_sample!r}. {_REMEDY}"
            )
        if not milliseconds_per_sample:
            raise ValueError(f"`milliseconds_per_sample` is empty. {_REMEDY}")
        for milliseconds in milliseconds_per_sample:
            check_number("milliseconds_per_sample", milliseconds, most=_LONGEST, remedy=_REMEDY)
        super().__init__(width, learning_rate)
        self.milliseconds_per_sample = list(milliseconds_per_sample)

    @override
    def setup(self, stage: str) -> None:
        devices = getattr(self.trainer.strategy, "devices", [None])  # those of replicas; other strategies have one
        if len(self.milliseconds_per_sample) < len(devices):
            raise MisconfigurationException(
                f"`milliseconds_per_sample={self.milliseconds_per_sample}` has {len(self.milliseconds_per_sample)}"
                f" entries for {len(devices)} replicas. Give one number per replica."
            )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the cross-entropy of a batch (images, labels), slowly."""
        time.sleep(len(batch[0]) * self.milliseconds_per_sample[current_replica() or 0] / 1000)
        return super().training_step(batch, batch_idx)

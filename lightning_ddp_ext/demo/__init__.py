"""Models and real data that ship with installed packages, for the default runs of the command (extra `demo`)."""

import math
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext._lightning import (
    LightningDataModule,
    LightningModule,
    MisconfigurationException,
    OptimizerLRScheduler,
)
from lightning_ddp_ext._validation import check_integer, check_number

_DEFAULT = "Leave it out for the default."
_LARGEST, _LARGEST_OF = 2**16, {"seed": 2**32 - 1, "max_bytes": 2**31 - 1, "files": 2**31 - 1}


def check_options(**options: object) -> None:
    """Check the arguments of a demo constructor by name: sizes, the seed and the learning rate."""
    for name, value in options.items():
        if name == "learning_rate":
            check_number(name, value, remedy=_DEFAULT)
        else:
            least, most = 0 if name == "seed" else 1, _LARGEST_OF.get(name, _LARGEST)
            check_integer(name, value, least=least, most=most, remedy=_DEFAULT)


class DemoData(LightningDataModule):
    """Data of the package, whose `setup` sets `val_data` and `test_data`."""

    val_data: Dataset[Any]
    test_data: Dataset[Any]

    def __init__(self, batch_size: int, seed: int) -> None:
        super().__init__()
        check_options(batch_size=batch_size, seed=seed)
        self.batch_size = batch_size
        self.seed = seed

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation batches."""
        return DataLoader(self.val_data, self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the test batches."""
        return DataLoader(self.test_data, self.batch_size)


def cosine_adamw(module: LightningModule, learning_rate: float) -> OptimizerLRScheduler:
    """Return AdamW with a learning rate that falls to zero along a cosine, for `configure_optimizers`."""
    steps = module.trainer.estimated_stepping_batches
    if math.isinf(steps):
        raise MisconfigurationException(
            f"the learning rate of {type(module).__name__} falls to zero at the end of training, but neither"
            " `trainer.max_steps` nor `trainer.max_epochs` limits the training. Set `trainer.max_steps`."
        )
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, int(steps)))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

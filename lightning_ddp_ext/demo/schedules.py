"""The optimizer of the demo models."""

import math

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig


def cosine_adamw(module: LightningModule, learning_rate: float) -> OptimizerLRSchedulerConfig:
    """Return AdamW with a learning rate that falls to zero along a cosine.

    Args:
        module: What is trained.
        learning_rate: The first learning rate.

    Returns:
        What `configure_optimizers` returns.

    Raises:
        MisconfigurationException: If training has no end to fall towards.
    """
    steps = module.trainer.estimated_stepping_batches
    if math.isinf(steps):
        raise MisconfigurationException(
            f"the learning rate of {type(module).__name__} falls to zero at the end of training, and nothing says when"
            " that is (`trainer.max_steps` and `trainer.max_epochs`). Set `trainer.max_steps`."
        )
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, int(steps)))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

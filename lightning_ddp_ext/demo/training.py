"""Options and schedules that the demo models share."""

import math

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig

from lightning_ddp_ext._validation import check_integer, check_number

_DEFAULT = "Leave it out for the default."
_MOST = {
    "batch_size": 10**6, "block_size": 2**16, "files": 10**6, "max_bytes": 10**12, "width": 4096, "depth": 256,
    "heads": 4096,
}  # fmt: skip
_LAST_SEED = 2**63 - 1


def check_sizes(**sizes: object) -> None:
    """Check arguments that count something, by name.

    Raises:
        TypeError: If one is not an integer.
        ValueError: If one is below 1, or absurdly large.
    """
    for name, value in sizes.items():
        check_integer(name, value, least=1, most=_MOST[name], remedy=_DEFAULT)


def check_seed(seed: object) -> None:
    """Check the seed of a generator.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If torch does not take it.
    """
    check_integer("seed", seed, most=_LAST_SEED, remedy=_DEFAULT)


def check_learning_rate(learning_rate: object) -> None:
    """Check a learning rate.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is negative or not finite.
    """
    check_number("learning_rate", learning_rate, least=0, remedy=_DEFAULT)


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

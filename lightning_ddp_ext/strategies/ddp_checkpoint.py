"""Distributed training that is right under activation checkpointing, several losses and graphs that change."""

from typing import Any

from typing_extensions import override

from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy


class DDPCheckpointStrategy(ExplicitDDPStrategy):
    """One process per device, for models that recompute activations or have more than one backward pass in a step.

    torch's `DistributedDataParallel` assumes that each parameter gets its gradient once per backward pass. Activation
    checkpointing (also called gradient checkpointing), several losses, alternating tasks and layers that are frozen or
    thawed break that, with an error or silently. Here they are the ordinary case, and there is no flag to set.

    Registered as `"ddp_checkpoint"`. The arguments are those of `ExplicitDDPStrategy`.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_ddp_ext import DDPCheckpointStrategy
        >>> trainer = Trainer(strategy=DDPCheckpointStrategy(), accelerator="cpu", devices=2, logger=False)
    """

    strategy_name = "ddp_checkpoint"

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)

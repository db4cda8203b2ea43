"""One process per device, each with equally many batches: `ddp_checkpoint`."""

from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy


class DDPCheckpointStrategy(ExplicitDDPStrategy):
    """One process per device, for models that recompute activations or have more than one backward pass in a step.

    torch's `DistributedDataParallel` assumes that each parameter gets its gradient once per backward pass. Activation
    checkpointing (also called gradient checkpointing), several losses, alternating tasks and layers that are frozen or
    thawed violate that, with an error or silently. Here they are supported without any flag.

    Registered as `"ddp_checkpoint"`. It has the arguments of `ExplicitDDPStrategy`.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_ddp_ext import DDPCheckpointStrategy
        >>> trainer = Trainer(strategy=DDPCheckpointStrategy(), accelerator="cpu", devices=2, logger=False)
    """

"""The strategies for `lightning.fabric.Fabric`."""

from lightning_ddp_ext.fabric.shared_batches import BalancedDDPStrategy
from lightning_ddp_ext.fabric.strategies import DDPCheckpointStrategy, DDPJoinStrategy

__all__ = ["BalancedDDPStrategy", "DDPCheckpointStrategy", "DDPJoinStrategy"]

"""The strategies for `lightning.fabric.Fabric`."""

from lightning_ddp_ext.fabric.loop_strategy import LoopStrategy
from lightning_ddp_ext.fabric.strategies import BalancedDDPStrategy, DDPCheckpointStrategy, DDPJoinStrategy

__all__ = ["BalancedDDPStrategy", "DDPCheckpointStrategy", "DDPJoinStrategy", "LoopStrategy"]

"""The strategies for `lightning.fabric.Fabric`."""

from lightning_ddp_ext.fabric.strategies import DDPCheckpointStrategy, DDPJoinStrategy

__all__ = ["DDPCheckpointStrategy", "DDPJoinStrategy"]

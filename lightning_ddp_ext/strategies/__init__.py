"""Lightning strategies, one per file."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy
from lightning_ddp_ext.strategies.ddp_checkpoint import DDPCheckpointStrategy
from lightning_ddp_ext.strategies.ddp_join import DDPJoinStrategy
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy

__all__ = ["BalancedDataParallelStrategy", "DDPCheckpointStrategy", "DDPJoinStrategy", "ExplicitDDPStrategy"]

BalancedDataParallelStrategy.register_strategies(StrategyRegistry)
DDPCheckpointStrategy.register_strategies(StrategyRegistry)
DDPJoinStrategy.register_strategies(StrategyRegistry)

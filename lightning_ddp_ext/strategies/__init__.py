"""Lightning strategies, one per file."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy

__all__ = ["BalancedDataParallelStrategy"]

BalancedDataParallelStrategy.register_strategies(StrategyRegistry)

# What type checkers see: classes that both of Lightning's base classes accept.
import lightning_fabric.plugins
import pytorch_lightning.strategies as theirs

import lightning_ddp_ext as ours
from lightning_ddp_ext import ClassWeights as ClassWeights
from lightning_ddp_ext import GradientReducer as GradientReducer
from lightning_ddp_ext import TokenBudgetBatchSampler as TokenBudgetBatchSampler
from lightning_ddp_ext import TokenCount as TokenCount
from lightning_ddp_ext import __version__ as __version__
from lightning_ddp_ext import scatter_objects as scatter_objects
from lightning_ddp_ext.errors import *  # noqa: F403

class BalancedDDPStrategy(ours.BalancedDDPStrategy, theirs.DDPStrategy): ...  # type: ignore
class BalancedDataParallelStrategy(ours.BalancedDataParallelStrategy, theirs.Strategy): ...  # type: ignore
class DDPCheckpointStrategy(ours.DDPCheckpointStrategy, theirs.DDPStrategy): ...  # type: ignore
class DDPJoinStrategy(ours.DDPJoinStrategy, theirs.DDPStrategy): ...  # type: ignore
class ExplicitDDPStrategy(ours.ExplicitDDPStrategy, theirs.DDPStrategy): ...  # type: ignore
class CheckedSLURMEnvironment(ours.CheckedSLURMEnvironment, lightning_fabric.plugins.ClusterEnvironment): ...
class ManualEnvironment(ours.ManualEnvironment, lightning_fabric.plugins.ClusterEnvironment): ...

"""Lightning's names, from the Lightning that this process uses: `lightning.pytorch` or `pytorch_lightning`.

Both distributions have the same code under two import names. A process uses one of them, see `_import_names`.
"""

# ruff: noqa: F401
from typing import TYPE_CHECKING

from lightning_ddp_ext._import_names import FIRST, choose

NAME = choose()
"""The import name."""

if TYPE_CHECKING or NAME == FIRST:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.fabric.plugins.environments.lsf import LSFEnvironment
    from lightning.fabric.plugins.environments.mpi import MPIEnvironment
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
    from lightning.fabric.utilities import move_data_to_device
    from lightning.fabric.utilities.apply_func import convert_to_tensors
    from lightning.fabric.utilities.cloud_io import get_filesystem
    from lightning.fabric.utilities.data import sized_len
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.fabric.utilities.seed import pl_worker_init_function
    from lightning.fabric.utilities.warnings import PossibleUserWarning
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
    from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
    from lightning.pytorch.callbacks import (
        BasePredictionWriter,
        LambdaCallback,
        ModelCheckpoint,
        ProgressBar,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.profilers import PassThroughProfiler
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ParallelStrategy, Strategy
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn
    from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_warn
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from lightning.pytorch.utilities.types import STEP_OUTPUT, OptimizerLRScheduler
else:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.plugins.environments.lsf import LSFEnvironment
    from lightning_fabric.plugins.environments.mpi import MPIEnvironment
    from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning_fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from lightning_fabric.strategies.strategy import Strategy as FabricStrategy
    from lightning_fabric.utilities import move_data_to_device
    from lightning_fabric.utilities.apply_func import convert_to_tensors
    from lightning_fabric.utilities.cloud_io import get_filesystem
    from lightning_fabric.utilities.data import sized_len
    from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from lightning_fabric.utilities.seed import pl_worker_init_function
    from lightning_fabric.utilities.warnings import PossibleUserWarning
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
    from pytorch_lightning.accelerators import Accelerator, AcceleratorRegistry
    from pytorch_lightning.callbacks import (
        BasePredictionWriter,
        LambdaCallback,
        ModelCheckpoint,
        ProgressBar,
        StochasticWeightAveraging,
    )
    from pytorch_lightning.loggers import Logger
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.overrides.distributed import UnrepeatedDistributedSamplerWrapper
    from pytorch_lightning.plugins.precision import MixedPrecision, Precision
    from pytorch_lightning.profilers import PassThroughProfiler
    from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ParallelStrategy, Strategy
    from pytorch_lightning.trainer.states import RunningStage, TrainerFn
    from pytorch_lightning.utilities import CombinedLoader, rank_zero_info, rank_zero_warn
    from pytorch_lightning.utilities.exceptions import SIGTERMException
    from pytorch_lightning.utilities.model_helpers import is_overridden
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
    from pytorch_lightning.utilities.types import STEP_OUTPUT, OptimizerLRScheduler

"""Lightning strategies that keep the gradient of the whole batch, however the batch is split."""

from lightning_ddp_ext.clusters.manual import ManualEnvironment
from lightning_ddp_ext.clusters.slurm import CheckedSLURMEnvironment
from lightning_ddp_ext.errors import (
    ActivationCheckpointingError,
    BackendError,
    BatchSplitError,
    CheckpointRefusedError,
    ClusterError,
    DDPExtError,
    LoggedKeysError,
    NetworkInterfaceError,
    OtherRankError,
    RankJoinedError,
    RanksOutOfStepError,
    RendezvousError,
    ReplicaMismatchError,
    UnevenInputsError,
    UnsupportedFeatureError,
    UnsynchronizedGradientsError,
)
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from lightning_ddp_ext.strategies import (
    BalancedDataParallelStrategy,
    DDPCheckpointStrategy,
    DDPJoinStrategy,
    ExplicitDDPStrategy,
)

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointingError",
    "BackendError",
    "BalancedDataParallelStrategy",
    "BatchSplitError",
    "CheckedSLURMEnvironment",
    "CheckpointRefusedError",
    "ClusterError",
    "DDPCheckpointStrategy",
    "DDPExtError",
    "DDPJoinStrategy",
    "ExplicitDDPStrategy",
    "GradientReducer",
    "LoggedKeysError",
    "ManualEnvironment",
    "NetworkInterfaceError",
    "OtherRankError",
    "RankJoinedError",
    "RanksOutOfStepError",
    "RendezvousError",
    "ReplicaMismatchError",
    "UnevenInputsError",
    "UnsupportedFeatureError",
    "UnsynchronizedGradientsError",
    "__version__",
]

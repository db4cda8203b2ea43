"""Lightning strategies that keep the gradient of the whole batch, however the batch is split."""

from lightning_ddp_ext.errors import (
    ActivationCheckpointingError,
    BackendError,
    BatchSplitError,
    DDPExtError,
    NetworkInterfaceError,
    RanksOutOfStepError,
    RendezvousError,
    ReplicaMismatchError,
    UnsupportedFeatureError,
    UnsynchronizedGradientsError,
)
from lightning_ddp_ext.integration.manual_cluster import ManualEnvironment
from lightning_ddp_ext.parallel.reducer import GradientReducer
from lightning_ddp_ext.strategies import BalancedDataParallelStrategy, DDPCheckpointStrategy, ExplicitDDPStrategy

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointingError",
    "BackendError",
    "BalancedDataParallelStrategy",
    "BatchSplitError",
    "DDPCheckpointStrategy",
    "DDPExtError",
    "ExplicitDDPStrategy",
    "GradientReducer",
    "ManualEnvironment",
    "NetworkInterfaceError",
    "RanksOutOfStepError",
    "RendezvousError",
    "ReplicaMismatchError",
    "UnsupportedFeatureError",
    "UnsynchronizedGradientsError",
    "__version__",
]

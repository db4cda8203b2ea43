"""Lightning strategies that keep the gradient of the whole batch, however the batch is split."""

from lightning_ddp_ext.errors import (
    ActivationCheckpointingError,
    BatchSplitError,
    DDPExtError,
    NetworkInterfaceError,
    RanksOutOfStepError,
    UnsupportedFeatureError,
    UnsynchronizedGradientsError,
)
from lightning_ddp_ext.parallel.reducer import GradientReducer
from lightning_ddp_ext.strategies import BalancedDataParallelStrategy, DDPCheckpointStrategy, ExplicitDDPStrategy
    ReplicaMismatchError,
from lightning_ddp_ext.strategies import BalancedDataParallelStrategy

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointingError",
    "BalancedDataParallelStrategy",
    "BatchSplitError",
    "DDPCheckpointStrategy",
    "DDPExtError",
    "ExplicitDDPStrategy",
    "GradientReducer",
    "NetworkInterfaceError",
    "RanksOutOfStepError",
    "ReplicaMismatchError",
    "UnsupportedFeatureError",
    "UnsynchronizedGradientsError",
    "__version__",
]

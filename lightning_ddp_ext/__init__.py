"""Lightning strategies that keep the gradient of the whole batch, however the batch is split."""

from lightning_ddp_ext.errors import (
    ActivationCheckpointingError,
    BatchSplitError,
    DDPExtError,
    NetworkInterfaceError,
    UnsupportedFeatureError,
)
from lightning_ddp_ext.strategies import BalancedDataParallelStrategy

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointingError",
    "BalancedDataParallelStrategy",
    "BatchSplitError",
    "DDPExtError",
    "NetworkInterfaceError",
    "UnsupportedFeatureError",
    "__version__",
]

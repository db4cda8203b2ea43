"""Lightning strategies that keep the gradient of the whole batch, however the batch is split."""

from lightning_ddp_ext.errors import (
    BatchSplitError,
    DDPExtError,
    NetworkInterfaceError,
    ReplicaMismatchError,
    UnsupportedFeatureError,
)
from lightning_ddp_ext.strategies import BalancedDataParallelStrategy

__version__ = "0.1.0"

__all__ = [
    "BalancedDataParallelStrategy",
    "BatchSplitError",
    "DDPExtError",
    "NetworkInterfaceError",
    "ReplicaMismatchError",
    "UnsupportedFeatureError",
    "__version__",
]

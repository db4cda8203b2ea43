"""Lightning strategies that keep the gradient of the whole batch, however the batch is split."""

from lightning_ddp_ext.errors import (
    BackendError,
    BatchSplitError,
    DDPExtError,
    NetworkInterfaceError,
    RendezvousError,
    UnsupportedFeatureError,
)
from lightning_ddp_ext.integration.manual_cluster import ManualEnvironment
from lightning_ddp_ext.strategies import BalancedDataParallelStrategy

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "BalancedDataParallelStrategy",
    "BatchSplitError",
    "DDPExtError",
    "ManualEnvironment",
    "NetworkInterfaceError",
    "RendezvousError",
    "UnsupportedFeatureError",
    "__version__",
]

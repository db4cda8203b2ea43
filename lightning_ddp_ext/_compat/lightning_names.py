"""Private classes and functions of Lightning, under the import name that this process uses."""

# ruff: noqa: F401
from typing import TYPE_CHECKING

from lightning_ddp_ext._import_names import FIRST
from lightning_ddp_ext._lightning import NAME

if TYPE_CHECKING or NAME == FIRST:
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
    from lightning.pytorch.trainer.connectors.logger_connector.result import (
        _Metadata,
        _ResultCollection,
        _ResultMetric,
        _Sync,
    )
    from lightning.pytorch.utilities.combined_loader import _shutdown_workers_and_reset_iterator
    from lightning.pytorch.utilities.exceptions import _TunerExitException
else:
    from lightning_fabric.strategies.strategy import _BackwardSyncControl
    from lightning_fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
    from pytorch_lightning.overrides.distributed import _IndexBatchSamplerWrapper
    from pytorch_lightning.trainer.connectors.logger_connector.result import (
        _Metadata,
        _ResultCollection,
        _ResultMetric,
        _Sync,
    )
    from pytorch_lightning.utilities.combined_loader import _shutdown_workers_and_reset_iterator
    from pytorch_lightning.utilities.exceptions import _TunerExitException

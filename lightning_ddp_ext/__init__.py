"""Lightning strategies that keep the gradient of the whole batch, however the batch is split."""

from typing import TYPE_CHECKING, Any

from lightning_ddp_ext import _import_names
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

if TYPE_CHECKING:
    from lightning_ddp_ext.batches.label_counts import ClassWeights, TokenCount
    from lightning_ddp_ext.batches.token_batches import TokenBudgetBatchSampler
    from lightning_ddp_ext.clusters.environments import CheckedSLURMEnvironment, ManualEnvironment
    from lightning_ddp_ext.distributed.exchange import scatter_objects
    from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
    from lightning_ddp_ext.strategies.balanced_ddp import BalancedDDPStrategy
    from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy
    from lightning_ddp_ext.strategies.ddp_checkpoint import DDPCheckpointStrategy
    from lightning_ddp_ext.strategies.ddp_join import DDPJoinStrategy
    from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointingError",
    "BackendError",
    "BalancedDDPStrategy",
    "BalancedDataParallelStrategy",
    "BatchSplitError",
    "CheckedSLURMEnvironment",
    "CheckpointRefusedError",
    "ClassWeights",
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
    "TokenBudgetBatchSampler",
    "TokenCount",
    "UnevenInputsError",
    "UnsupportedFeatureError",
    "UnsynchronizedGradientsError",
    "__version__",
    "scatter_objects",
]


_import_names.install()


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        return _import_names.get_public(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

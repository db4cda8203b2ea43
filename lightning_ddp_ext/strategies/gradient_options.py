"""The arguments of gradients and batches that the strategies for the Trainer and for Fabric share."""

from typing import Any

from lightning_ddp_ext._import_names import DISTRIBUTIONS
from lightning_ddp_ext._lightning import NAME
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext._validation import check_bucket_cap, check_integer
from lightning_ddp_ext.activation_checkpointing import ActivationCheckpointing, ActivationCheckpointingPolicy
from lightning_ddp_ext.batches.sample_counts import BatchSamples
from lightning_ddp_ext.batches.weights import WeightBy, WeightRule
from lightning_ddp_ext.consistency import compare_setups, describe_arguments, describe_versions


def describe_versions_of_run() -> dict[str, object]:
    """Describe the versions that all ranks share, with the distribution of Lightning that this module imports."""
    return describe_versions(DISTRIBUTIONS[NAME])


class GradientOptionsMixin:
    """Mixin with the arguments of gradients and batches that the strategies for the Trainer and for Fabric share."""

    def __init__(
        self,
        *args: Any,
        bucket_cap_mb: float = 25.0,
        weight_by: WeightBy = "samples",
        batch_dim: int = 0,
        activation_checkpointing: ActivationCheckpointingPolicy | None = None,
        **options: Any,
    ) -> None:
        check_integer("batch_dim", batch_dim, remedy="Use 0 for batches whose first dimension counts samples.")
        check_bucket_cap(bucket_cap_mb)
        self.bucket_cap_mb, self.weight_by, self.batch_dim = bucket_cap_mb, weight_by, batch_dim
        self.activation_checkpointing = activation_checkpointing
        self._weight_rule = WeightRule(weight_by, rank_zero_info)
        self._samples = BatchSamples(batch_dim)
        self._checkpointing = (
            None if activation_checkpointing is None else ActivationCheckpointing(activation_checkpointing)
        )
        super().__init__(*args, **options)

    def compared_arguments(self) -> dict[str, object]:
        """Return the arguments that must be the same on every rank."""
        return {
            "strategy": type(self),
            "bucket_cap_mb": self.bucket_cap_mb,
            "weight_by": self.weight_by,
            "batch_dim": self.batch_dim,
            "activation_checkpointing": self.activation_checkpointing,
        }

    def compare_ranks(self) -> None:
        """Raise a ReplicaMismatchError on all ranks unless they have the same versions and arguments."""
        compare_setups({**describe_versions_of_run(), **describe_arguments(self.compared_arguments())})

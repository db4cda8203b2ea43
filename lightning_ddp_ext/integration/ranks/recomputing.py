"""Activation checkpointing as an argument of a strategy."""

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_ddp_ext.parallel.recomputation.activation_checkpointing import (
    ActivationCheckpointing,
    ActivationCheckpointingPolicy,
)


class Recomputing:
    """Lets a module recompute activations while it is trained, and says once what that saves.

    Args:
        policy: See `ActivationCheckpointing`; None to keep all activations.
    """

    def __init__(self, policy: ActivationCheckpointingPolicy | None) -> None:
        self.policy = policy
        self._checkpointing = None if policy is None else ActivationCheckpointing(policy)
        self._is_reported = False

    def start(self, module: nn.Module) -> None:
        """Let the parts of a module that the policy names recompute."""
        if self._checkpointing is not None:
            self._checkpointing.apply(module)
            self._is_reported = False

    def report(self) -> None:
        """Say what is saved, after the first backward pass."""
        if self._checkpointing is not None and not self._is_reported:
            self._is_reported = True
            rank_zero_info(f"On each rank, {self._checkpointing.report}.")

    def stop(self, module: nn.Module) -> None:
        """Leave a module as it was."""
        if self._checkpointing is not None:
            self._checkpointing.remove(module)

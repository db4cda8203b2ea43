"""The loss of a batch whose chunks have losses of their own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.integration.replicas.replicated_step import ReplicatedModule, ScatteredBatch


class CombinedLoss:
    """The weighted sum of the replicas' losses, cut off from their graphs.

    Lightning's own backward pass (precision, accumulation, overrides) ends here; `backward` goes on in the replicas.

    Args:
        losses: The loss of each active replica.
        scattered: What they were computed from. Not all of its weights are 0.
        device: Where the sum is made.

    Attributes:
        value: The sum.
    """

    def __init__(self, losses: Sequence[Tensor], scattered: ScatteredBatch, device: torch.device) -> None:
        self._losses = losses
        self._scattered = scattered
        self._leaves = [loss.detach().to(device).requires_grad_(loss.requires_grad) for loss in losses]
        # A chunk that counts nothing is left out: its loss may be a mean over nothing, and 0 * nan is nan.
        for leaf in self._leaves:
            if leaf.requires_grad:
                leaf.register_hook(_refuse_second_order)  # type: ignore[no-untyped-call]
        terms = [leaf * weight for leaf, weight in zip(self._leaves, scattered.weights, strict=True) if weight]
        self.value = torch.stack(terms).sum(0)

    def backward(self, replicated: ReplicatedModule) -> None:
        """Take the gradient that the sum has got through the replicas' graphs, and add up what comes out."""
        replicated.backward(self._losses, [leaf.grad for leaf in self._leaves], self._scattered)


def _refuse_second_order(gradient: Tensor) -> None:
    # Autograd records gradients in a backward pass only with `create_graph=True`.
    if torch.is_grad_enabled():
        raise UnsupportedFeatureError(
            "`balanced_dp` cannot run `backward(create_graph=True)`: the module's gradients are sums over replicas and"
            " have no graph to differentiate. Train optimizers that need second-order gradients, such as AdaHessian,"
            ' with `strategy="auto", devices=1`; a gradient penalty may call'
            " `torch.autograd.grad(..., create_graph=True)` inside `training_step`."
        )

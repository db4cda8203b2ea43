"""Batch normalisation needs more than one value per channel to train."""

from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext._compat.torch import BatchNorm
from lightning_ddp_ext.parallel.replicas import Replicas


class SingleSampleGuard:
    """Knows whether the module's batch normalisation refuses a chunk of one sample.

    It does where a sample has one value per channel, as behind a linear layer; over the pixels of an image one sample
    is enough. The first batch shows which; until then, and inside of `torch.compile`, the answer is the careful one.

    Args:
        replicas: The replicas, just built.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._layers = [module for module in replicas.master.modules() if isinstance(module, BatchNorm)]
        self._values_per_sample: set[int] = set()
        for replica in replicas:
            for layer in self._layers:
                self._observe_once(replica.references.find(layer))

    def _observe_once(self, layer: Any) -> None:
        original, patched = layer.forward, layer.__dict__.get("forward")

        def forward(inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Looking on would break a compiled graph.
            if not torch.compiler.is_compiling():
                # The instance attribute hides the method for one call. A hook would be shared with the master.
                layer.__dict__.pop("forward", None)
                if patched is not None:
                    layer.__dict__["forward"] = patched
                if inputs.numel():
                    self._values_per_sample.add(inputs.numel() // (inputs.size(0) * inputs.size(1)))
            return original(inputs, *args, **kwargs)

        layer.__dict__["forward"] = forward

    def refuses_single_samples(self) -> bool:
        """Tell whether a chunk of one sample would raise an error now."""
        if not any(layer.training or layer.running_mean is None for layer in self._layers):
            return False
        return not self._values_per_sample or 1 in self._values_per_sample

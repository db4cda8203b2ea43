"""Bringing buffers that replicas have changed back together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ddp_ext.parallel.replicas import Replicas


def merge_buffers(replicas: Replicas, active: Sequence[int], weights: Sequence[float]) -> None:
    """Write the replicas' buffers into the master's.

    Floating-point buffers that a replica has changed become the weighted mean of the replicas', which is exact for the
    running mean of batch normalisation; its running variance lacks the variance between the chunks' means. Integer
    buffers come from the first active replica.

    Args:
        replicas: The replicas, after a step.
        active: Indices of the replicas that took part.
        weights: What each of them counts.
    """
    total = sum(weights)
    with torch.inference_mode(False), torch.no_grad():
        for position, (original, _) in enumerate(replicas[active[0]].modules):
            for name, buffer in original._buffers.items():
                if buffer is None:
                    continue
                own = [replicas[index].modules[position][1]._buffers[name] for index in active]
                _merge(buffer, own, [weight / total for weight in weights])


def _merge(buffer: Tensor, own: Sequence[Tensor], weights: Sequence[float]) -> None:
    values = [value.to(buffer.device) for value in own]
    if not buffer.is_floating_point() or len(values) == 1:
        buffer.copy_(values[0])
        return
    # As a sum of changes, so that a buffer that nobody has changed keeps every bit.
    change = torch.zeros_like(buffer)
    for value, weight in zip(values, weights, strict=True):
        change.add_(value - buffer, alpha=weight)
    buffer.add_(change)

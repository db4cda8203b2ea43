"""Batch normalisation: which chunks it refuses, and running statistics as one device would have them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext._compat.torch import BatchNorm
from lightning_ddp_ext.parallel.replicas import Replicas

_STATISTICS = ("running_mean", "running_var")


@dataclass(slots=True)
class _Call:
    """One forward pass of a layer on one replica.

    Attributes:
        values: How many values per channel the layer saw.
        before: Its running statistics before the call; None for the first call of a step.
    """

    values: int
    before: list[Tensor] | None


class BatchNormObserver:
    """Sees what the replicas' batch normalisation layers see.

    A layer normalises each chunk by itself, and refuses a chunk with a single value per channel while training. Its
    running statistics follow from those of the chunks: the mean from their means, the variance from the variances
    within the chunks and the variance between their means (the law of total variance).

    Args:
        replicas: The replicas, just built.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._layers: list[Any] = [module for module in replicas.master.modules() if isinstance(module, BatchNorm)]
        self._copies: list[list[Any]] = [[r.references.find(layer) for layer in self._layers] for r in replicas]
        self._calls: list[list[list[_Call]]] = [[[] for _ in self._layers] for _ in replicas]
        self._values_per_sample: set[int] = set()
        for copies, calls in zip(self._copies, self._calls, strict=True):
            for copy, own in zip(copies, calls, strict=True):
                self._observe(copy, own)

    def _observe(self, layer: Any, calls: list[_Call]) -> None:
        original = layer.forward

        def forward(input: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                # Compiled code may only write, and always the same: it is compiled again when what it reads changes.
                layer._values_per_sample = input.shape[2:].numel()
            elif layer.training and input.numel():
                values = input.numel() // input.size(1)
                self._values_per_sample.add(values // input.size(0))
                if layer.running_mean is not None:
                    before = [getattr(layer, name).clone() for name in _STATISTICS] if calls else None
                    calls.append(_Call(values, before))
            return original(input, *args, **kwargs)

        # As an instance attribute: a hook would be shared with the master.
        layer.__dict__["forward"] = forward

    def refuses_single_samples(self) -> bool:
        """Tell whether a chunk of one sample would raise an error now; the first batch shows which layers do."""
        if not any(layer.training or layer.running_mean is None for layer in self._layers):
            return False
        return not self._values_per_sample or 1 in self._values_per_sample

    def forget(self) -> None:
        """Forget the calls of the last step; activation checkpointing adds some in its backward pass."""
        for calls in self._calls:
            for own in calls:
                own.clear()

    def merge(self, active: Sequence[int], sizes: Sequence[int]) -> set[int]:
        """Write the running statistics of the whole batch into the master.

        Args:
            active: Indices of the replicas that took part.
            sizes: Number of samples of each of them.

        Returns:
            Ids of the master's buffers that are merged now. Those of layers that compiled code has called more than
            once are not.
        """
        for index, size in zip(active, sizes, strict=True):
            self._add_compiled_calls(index, size)
        groups: dict[tuple[torch.dtype, int], list[int]] = {}
        for position, layer in enumerate(self._layers):
            calls = max(len(self._calls[index][position]) for index in active)
            if calls and layer.momentum != 0:
                groups.setdefault((layer.running_mean.dtype, calls), []).append(position)
        with torch.no_grad():
            for (_, calls), positions in groups.items():
                self._merge_group(active, positions, calls)
        merged = [self._layers[position] for positions in groups.values() for position in positions]
        return {id(getattr(layer, name)) for layer in merged for name in _STATISTICS}

    def _add_compiled_calls(self, index: int, size: int) -> None:
        for layer, copy, calls in zip(self._layers, self._copies[index], self._calls[index], strict=True):
            values_per_sample = copy.__dict__.get("_values_per_sample")
            if calls or values_per_sample is None or copy.running_mean is None or copy.num_batches_tracked is None:
                continue
            if int(copy.num_batches_tracked) - int(layer.num_batches_tracked) == 1:
                calls.append(_Call(size * values_per_sample, None))

    def _merge_group(self, active: Sequence[int], positions: Sequence[int], calls: int) -> None:
        """Merge layers that were called equally often, all of their channels in one vector."""
        layers = [self._layers[position] for position in positions]
        channels = torch.tensor([layer.num_features for layer in layers])
        device = layers[0].running_mean.device

        def spread(per_layer: Sequence[float]) -> Tensor:
            return torch.tensor(per_layer, dtype=torch.float64).repeat_interleave(channels).to(device)

        state = [torch.cat([getattr(layer, name) for layer in layers]).double() for name in _STATISTICS]
        starts = [state] * len(active)
        for call in range(calls):
            momentum = spread([_momentum(layer, call) for layer in layers])
            ends = [self._state(index, positions, call + 1, device) for index in active]
            values = [spread([self._values(index, position, call) for position in positions]) for index in active]
            batch = [
                [(end - (1 - momentum) * start) / momentum for start, end in zip(before, after, strict=True)]
                for before, after in zip(starts, ends, strict=True)
            ]
            total = torch.stack(values).sum(0)
            mean = sum((n / total * m for n, (m, _) in zip(values, batch, strict=True)), torch.zeros_like(total))
            squares = [
                torch.where(n > 0, (n - 1) * variance + n * (m - mean) ** 2, 0.0)
                for n, (m, variance) in zip(values, batch, strict=True)
            ]
            variance = torch.stack(squares).sum(0) / (total - 1)
            state = [(1 - momentum) * state[0] + momentum * mean, (1 - momentum) * state[1] + momentum * variance]
            starts = ends
        for name, vector in zip(_STATISTICS, state, strict=True):
            for layer, part in zip(layers, torch.split(vector, channels.tolist()), strict=True):
                getattr(layer, name).copy_(part)

    def _values(self, index: int, position: int, call: int) -> float:
        own = self._calls[index][position]
        return float(own[call].values) if call < len(own) else 0.0

    def _state(self, index: int, positions: Sequence[int], calls: int, device: torch.device) -> list[Tensor]:
        """The running statistics of a replica's layers after so many calls."""
        after: list[list[Tensor]] = []
        for position in positions:
            own, layer = self._calls[index][position], self._copies[index][position]
            snapshot = own[calls].before if calls < len(own) else None
            after.append(snapshot or [getattr(layer, name) for name in _STATISTICS])
        return [torch.cat([pair[which] for pair in after]).to(device).double() for which in range(len(_STATISTICS))]


def _momentum(layer: Any, call: int) -> float:
    """What a call counts in the running statistics; without a momentum they are a cumulative mean."""
    return float(layer.momentum) if layer.momentum is not None else 1.0 / (int(layer.num_batches_tracked) + call + 1)

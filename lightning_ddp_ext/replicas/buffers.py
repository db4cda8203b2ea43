"""Buffers of replicas, batch normalisation statistics among them."""

import warnings
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import BatchNorm, Normalisation
from lightning_ddp_ext.reducer.buffers import same_values
from lightning_ddp_ext.replicas.attributes import SampleCounters
from lightning_ddp_ext.replicas.replica import Replicas


class BufferMerger:
    """Writes the replicas' buffers into the master's.

    Floating-point and complex buffers that replicas have changed become the weighted mean of the replicas', integer
    buffers come from the first active replica. Counters of samples, which each replica has raised by as much as it had,
    are added up, in modules without larger buffers. Where replicas disagree on another buffer than those of
    normalisation layers, a warning names it once: a count or a queue, say, is not a mean.

    Args:
        replicas: The replicas, just built.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._modules: list[nn.Module] = [module for module, _ in replicas[0].modules]
        names = {id(module): name for name, module in replicas.master.named_modules()}
        self._names = [f"{names[id(module)]}." if names[id(module)] else "" for module in self._modules]
        self._sample_counters = SampleCounters()
        self._warned: set[str] = set()

    def merge(self, active: Sequence[int], sizes: Sequence[int], merged: Set[int] = frozenset()) -> None:
        """Merge what a step has changed.

        Args:
            active: Indices of the replicas that took part.
            sizes: Samples of each of them.
            merged: Ids of buffers of the master that hold the values of the whole batch already.
        """
        done = set(merged)
        with torch.inference_mode(False), torch.no_grad():
            for position, module in enumerate(self._modules):
                own = [self._replicas[index].modules[position][1]._buffers for index in active]
                for name in own[0]:
                    buffer = module._buffers.get(name)
                    if id(buffer) not in done:  # nor does another module hold it as well
                        done |= set() if buffer is None else {id(buffer)}
                        values = [buffers.get(name) for buffers in own]
                        self._merge_one(position, module, name, values, sizes)

    def _merge_one(
        self, position: int, module: nn.Module, name: str, values: Sequence[Tensor | None], sizes: Sequence[int]
    ) -> None:
        buffer = module._buffers.get(name)
        present = [value.to(self._replicas[0].device) for value in values if value is not None]
        if len(present) < len(values) or buffer is None or any(value.shape != buffer.shape for value in present):
            # A step may create a buffer, drop it or give it another shape: what the first replica has counts.
            if values[0] is not None or buffer is not None:
                module._buffers[name] = None if values[0] is None else present[0].clone()
            return
        changed = [value for value in present if not same_values(value, buffer)]
        if not changed:
            return
        # One beside a larger buffer may well be the place in a queue where the next entry goes.
        is_alone = all(other is None or other.numel() <= 1 for other in module._buffers.values())
        if is_alone and self._counts_samples(self._names[position] + name, buffer, present, sizes):
            buffer += sum(sizes)
            return
        if len(changed) < len(present) or any(not same_values(value, present[0]) for value in present[1:]):
            # A mean is exact for statistics of instances; those of batches are merged already, if calls were seen.
            if not isinstance(module, Normalisation) or isinstance(module, BatchNorm):
                self._warn(self._names[position] + name, _has_mean(buffer))
            if _has_mean(buffer):
                _write_mean(buffer, present, [size / sum(sizes) for size in sizes])
                return
        buffer.copy_(present[0])

    def _counts_samples(self, name: str, buffer: Tensor, values: Sequence[Tensor], sizes: Sequence[int]) -> bool:
        if buffer.numel() != 1 or buffer.is_complex() or buffer.dtype is torch.bool:
            return False
        return self._sample_counters.recognise(name, [(value - buffer).item() for value in values], sizes)

    def _warn(self, name: str, has_mean: bool) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        kept = "their mean by samples" if has_mean else "that of the first replica with samples"
        warnings.warn(
            f"buffer `{name}` was changed differently by each replica; the module keeps {kept}. For a count, a queue or"
            " a maximum use a metric, or change it in a hook such as `on_train_batch_end`.",
            stacklevel=2,
        )


def _has_mean(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _write_mean(buffer: Tensor, values: Sequence[Tensor], factors: Sequence[float]) -> None:
    mean = torch.zeros_like(buffer)
    untouched = torch.ones_like(buffer, dtype=torch.bool)
    for value, factor in zip(values, factors, strict=True):
        mean.add_(value, alpha=factor)
        untouched &= (value == buffer) | ((value != value) & (buffer != buffer))
    # Elements that nobody has changed keep every bit, infinities among them.
    buffer.copy_(torch.where(untouched, buffer, mean))


_STATISTICS = ("running_mean", "running_var")


@dataclass(slots=True)
class _Call:
    """One forward pass of a layer on one replica.

    Attributes:
        values: How many values per channel the layer saw.
        momentum: What the call counts in the running statistics.
        before: The running statistics before the call.
    """

    values: int
    momentum: float
    before: list[Tensor]


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
                    before = [getattr(layer, name).clone() for name in _STATISTICS]
                    calls.append(_Call(values, _momentum(layer), before))
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
        merged: set[int] = set()
        with torch.no_grad():
            for position, layer in enumerate(self._layers):
                calls = max(len(self._calls[index][position]) for index in active)
                if calls == 0:
                    continue
                merged |= {id(layer.running_mean), id(layer.running_var), id(layer.num_batches_tracked)}
                busiest = max(active, key=lambda index: len(self._calls[index][position]))
                if layer.num_batches_tracked is not None:
                    layer.num_batches_tracked.copy_(self._copies[busiest][position].num_batches_tracked)
                if self._calls[busiest][position][0].momentum:
                    groups.setdefault((layer.running_mean.dtype, calls), []).append(position)
            for (_, calls), positions in groups.items():
                self._merge_group(active, positions, calls)
        return merged

    def _add_compiled_calls(self, index: int, size: int) -> None:
        for layer, copy, calls in zip(self._layers, self._copies[index], self._calls[index], strict=True):
            values_per_sample = copy.__dict__.get("_values_per_sample")
            if calls or values_per_sample is None or copy.running_mean is None or copy.num_batches_tracked is None:
                continue
            if int(copy.num_batches_tracked) - int(layer.num_batches_tracked) == 1:
                before = [getattr(layer, name).to(copy.running_mean.device) for name in _STATISTICS]
                calls.append(_Call(size * values_per_sample, _momentum(layer), before))

    def _merge_group(self, active: Sequence[int], positions: Sequence[int], calls: int) -> None:
        """Merge layers that were called equally often, all of their channels in one vector."""
        layers = [self._layers[position] for position in positions]
        channels = torch.tensor([layer.num_features for layer in layers])
        device = layers[0].running_mean.device

        def spread(per_layer: Sequence[float]) -> Tensor:
            return torch.tensor(per_layer, dtype=torch.float64).repeat_interleave(channels).to(device)

        state: list[Tensor] = []
        for call in range(calls):
            leaders = [self._leader(active, position, call) for position in positions]
            momentum = spread([self._calls[i][p][call].momentum for i, p in zip(leaders, positions, strict=True)])
            state = state or self._around(leaders, positions, call, device)[0]
            values: list[Tensor] = []
            statistics: list[list[Tensor]] = []
            for index in active:
                made = [call < len(self._calls[index][position]) for position in positions]
                # Where a replica has not made the call, that of another stands in, with no values.
                sources = [index if own else leader for own, leader in zip(made, leaders, strict=True)]
                own_calls = [self._calls[i][p][call] for i, p in zip(sources, positions, strict=True)]
                values.append(spread([c.values if own else 0 for own, c in zip(made, own_calls, strict=True)]))
                pairs = zip(*self._around(sources, positions, call, device), strict=True)
                statistics.append([(after - (1 - momentum) * before) / momentum for before, after in pairs])
            total = torch.stack(values).sum(0)
            mean = torch.stack([n / total * own for n, (own, _) in zip(values, statistics, strict=True)]).sum(0)
            squares = [
                torch.where(n > 0, (n - 1) * variance + n * (own - mean) ** 2, 0.0)
                for n, (own, variance) in zip(values, statistics, strict=True)
            ]
            variance = torch.stack(squares).sum(0) / (total - 1)
            state = [(1 - momentum) * state[0] + momentum * mean, (1 - momentum) * state[1] + momentum * variance]
        for name, vector in zip(_STATISTICS, state, strict=True):
            for layer, part in zip(layers, torch.split(vector, channels.tolist()), strict=True):
                getattr(layer, name).copy_(part)

    def _leader(self, active: Sequence[int], position: int, call: int) -> int:
        """The first replica that made a call."""
        return next(index for index in active if call < len(self._calls[index][position]))

    def _around(
        self, indices: Sequence[int], positions: Sequence[int], call: int, device: torch.device
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The running statistics of layers before and after a call, each layer's of the replica with its index."""
        before: list[list[Tensor]] = []
        after: list[list[Tensor]] = []
        for index, position in zip(indices, positions, strict=True):
            own, layer = self._calls[index][position], self._copies[index][position]
            before.append(own[call].before)
            is_last = call + 1 == len(own)
            after.append([getattr(layer, name) for name in _STATISTICS] if is_last else own[call + 1].before)
        vectors = [
            [torch.cat([pair[which].to(device) for pair in pairs]).double() for which in range(len(_STATISTICS))]
            for pairs in (before, after)
        ]
        return vectors[0], vectors[1]


def _momentum(layer: Any) -> float:
    """What the next call counts in the running statistics; without a momentum they are a cumulative mean."""
    if layer.momentum is not None:
        return float(layer.momentum)
    return 0.0 if layer.num_batches_tracked is None else 1.0 / (int(layer.num_batches_tracked) + 1)

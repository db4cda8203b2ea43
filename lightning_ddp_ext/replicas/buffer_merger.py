"""Buffers of replicas, batch normalisation statistics among them."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import BatchNorm, Normalisation, copy_mixed_, equal_or_nan
from lightning_ddp_ext.reducer.buffer_synchronizer import same_values
from lightning_ddp_ext.replicas.replica import Replicas, is_expanded


class BufferMerger:
    """Writes buffers that replicas have changed into the master's, and warns once if no rule fits.

    Floating-point and complex buffers become the mean by samples, other buffers come from the first active replica.
    Replicas keep buffers of different shapes.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._modules: list[nn.Module] = [module for module, _ in replicas[0].modules]
        self._prefixes = replicas.prefixes
        self._warnings = WarningCache()

    def merge(self, active: Sequence[int], sizes: Sequence[int], merged: Set[int] = frozenset()) -> None:
        """Merge the active replicas' buffers, except buffers of the master whose ids are in `merged`."""
        done = set(merged)
        changed = self._replicas.changed_buffers(active)
        if not changed:
            return
        with torch.inference_mode(False), torch.no_grad():
            for position, name in changed:
                buffer = self._modules[position]._buffers.get(name)
                if id(buffer) not in done:  # two modules may hold the same buffer
                    done |= set() if buffer is None else {id(buffer)}
                    own = [self._replicas[index].modules[position][1]._buffers.get(name) for index in active]
                    self._merge_one(position, name, own, sizes)

    def _merge_one(self, position: int, name: str, values: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
        module = self._modules[position]
        buffer = module._buffers.get(name)
        present = [value.to(self._replicas[0].device) for value in values if value is not None]
        if len(present) < len(values) or buffer is None or any(value.shape != buffer.shape for value in present):
            # A step may create a buffer, drop it or give it another shape: the first replica decides.
            if values[0] is not None or buffer is not None:
                module._buffers[name] = None if values[0] is None else present[0].clone()
            if len({None if value is None else value.shape for value in values}) > 1:
                self._replicas.keep_own((position, name))
            return
        changed = [value for value in present if not same_values(value, buffer)]
        if not changed:
            return
        if self._replicas.is_learning:
            self._replicas.changing.add((position, name))
        if is_expanded(buffer):
            buffer = module._buffers[name] = buffer.clone()
        full_name = self._prefixes[position] + name
        # Chunks of one size have the same number of samples, which is not the number of the whole batch.
        counts_samples = (
            len({*sizes}) == 1 < len(present)
            and sizes[0] > 1
            and buffer.numel() == 1
            and buffer.dtype is not torch.bool
            and (present[0] - buffer).item() == sizes[0]
        )
        differs = len(changed) < len(present) or any(not same_values(value, present[0]) for value in present[1:])
        if differs or counts_samples:
            has_mean = buffer.is_floating_point() or buffer.is_complex()
            # A mean is exact for instance statistics; batch statistics are merged already, if calls were seen.
            if not isinstance(module, Normalisation) or isinstance(module, BatchNorm):
                kept = "their mean by samples" if has_mean else "the buffer of the first replica with samples"
                self._warnings.warn(
                    f"buffer `{full_name}` was changed differently by each replica; the module keeps {kept}. For a"
                    " count, a queue or a maximum use a metric, or change it in a hook such as `on_train_batch_end`."
                )
            if has_mean:
                _write_mean(buffer, present, [size / sum(sizes) for size in sizes])
                return
        buffer.copy_(present[0])


def _write_mean(buffer: Tensor, values: Sequence[Tensor], factors: Sequence[float]) -> None:
    mean = torch.zeros_like(buffer)
    untouched = torch.ones_like(buffer, dtype=torch.bool)
    for value, factor in zip(values, factors, strict=True):
        mean.add_(value, alpha=factor)
        untouched &= equal_or_nan(value, buffer)
    # Elements that no replica has changed keep every bit, infinities among them.
    buffer.copy_(torch.where(untouched, buffer, mean))


def _statistics(layer: Any) -> list[Tensor]:
    return [layer.running_mean, layer.running_var]


@dataclass(slots=True)
class _Call:
    """One forward pass of a layer on one replica: values per channel, momentum, and the statistics before it."""

    values: int
    momentum: float
    before: list[Tensor]


@dataclass(slots=True)
class _Layer:
    """A batch normalisation layer of the master, with the copies of all replicas and their calls in a step."""

    master: Any
    copies: list[Any]
    calls: list[list[_Call]]

    def after(self, index: int, call: int) -> list[Tensor]:
        """Return the running statistics of a replica after a call."""
        calls = self.calls[index]
        return calls[call + 1].before if call + 1 < len(calls) else _statistics(self.copies[index])


class BatchNormObserver:
    """Observes calls of the replicas' batch normalisation layers and merges their running statistics.

    A layer normalises each chunk by itself, and refuses a chunk with a single value per channel while training. The
    statistics of the whole batch follow from the chunks' by the law of total variance.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._layers = [
            _Layer(module, [replica.references.find(module) for replica in replicas], [[] for _ in replicas])
            for module in replicas.master.modules()
            if isinstance(module, BatchNorm)
        ]
        self._values_per_sample: set[int] = set()
        self._keeps_calls = True
        for layer in self._layers:
            for copy, calls in zip(layer.copies, layer.calls, strict=True):
                self._observe(copy, calls)

    def _observe(self, layer: Any, calls: list[_Call]) -> None:
        original = layer.forward

        def forward(input: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                # Compiled code may only write, and always the same: it is compiled again when what it reads changes.
                layer._values_per_sample = input.shape[2:].numel()
            elif layer.training and input.numel():
                values = input.numel() // input.size(1)
                self._values_per_sample.add(values // input.size(0))
                if layer.running_mean is not None and self._keeps_calls:
                    calls.append(_Call(values, _momentum(layer), [one.clone() for one in _statistics(layer)]))
            return original(input, *args, **kwargs)

        # As an instance attribute, because the hooks of replicas are replaced when the master's change.
        layer.__dict__["forward"] = forward

    def refuses_single_samples(self) -> bool:
        """Return True if a chunk of one sample would raise an error now, as the first batch shows."""
        if not any(layer.master.training or layer.master.running_mean is None for layer in self._layers):
            return False
        return not self._values_per_sample or 1 in self._values_per_sample

    def expect(self, active: Sequence[int]) -> None:
        """Forget the calls of the last step; activation checkpointing adds some in its backward pass."""
        self._keeps_calls = len(active) > 1
        for layer in self._layers:
            for calls in layer.calls:
                calls.clear()

    def merge(self, active: Sequence[int], sizes: Sequence[int]) -> set[int]:
        """Write the whole batch's running statistics into the master, and return the ids of these buffers."""
        if not self._layers:
            return set()
        if len(active) == 1:
            return self._take_over(active[0])
        groups: dict[tuple[torch.dtype, int], list[_Layer]] = {}
        merged: set[int] = set()
        with torch.no_grad():
            _add_compiled_calls(self._layers, active, sizes)
            for layer in self._layers:
                busiest = max(active, key=lambda index, layer=layer: len(layer.calls[index]))  # type: ignore[misc]
                calls = layer.calls[busiest]
                if not calls:
                    continue
                master = layer.master
                merged |= {id(master.running_mean), id(master.running_var), id(master.num_batches_tracked)}
                if master.num_batches_tracked is not None:
                    master.num_batches_tracked.copy_(layer.copies[busiest].num_batches_tracked)
                if calls[0].momentum:
                    groups.setdefault((master.running_mean.dtype, len(calls)), []).append(layer)
            for (_, calls_made), layers in groups.items():
                _merge_statistics(layers, active, calls_made)
        return merged

    def _take_over(self, index: int) -> set[int]:
        """Copy the statistics of the only active replica, whose chunk is the batch."""
        pairs = [
            (own, copied)
            for layer in self._layers
            for name, own in layer.master._buffers.items()
            if (copied := layer.copies[index]._buffers.get(name)) is not None
            if own is not None and own.shape == copied.shape
        ]
        with torch.no_grad():
            copy_mixed_([own for own, _ in pairs], [copied for _, copied in pairs])
        return {id(own) for own, _ in pairs}


def _add_compiled_calls(layers: Sequence[_Layer], active: Sequence[int], sizes: Sequence[int]) -> None:
    """Add the calls that compiled code has made, of layers that it has called once."""
    silent = [
        (layer, layer.copies[index], layer.calls[index], size)
        for layer in layers
        for index, size in zip(active, sizes, strict=True)
        if not layer.calls[index] and _was_compiled(layer.copies[index])
    ]
    if not silent:
        return
    steps = [copy.num_batches_tracked.to(layer.master.num_batches_tracked.device) for layer, copy, _, _ in silent]
    made = torch.stack(steps) - torch.stack([layer.master.num_batches_tracked for layer, _, _, _ in silent])
    for (layer, copy, calls, size), number in zip(silent, made.tolist(), strict=True):  # the only wait for devices
        if number == 1:
            before = [one.to(copy.running_mean.device) for one in _statistics(layer.master)]
            calls.append(_Call(size * copy.__dict__["_values_per_sample"], _momentum(layer.master), before))


def _was_compiled(layer: Any) -> bool:
    has_statistics = layer.running_mean is not None and layer.num_batches_tracked is not None
    return has_statistics and "_values_per_sample" in vars(layer)


def _merge_statistics(layers: Sequence[_Layer], active: Sequence[int], calls: int) -> None:
    """Merge layers that were called equally often, with all of their channels in one vector."""
    channels = torch.tensor([layer.master.num_features for layer in layers])
    device = layers[0].master.running_mean.device
    dtype = torch.promote_types(layers[0].master.running_mean.dtype, torch.float32)

    def spread(per_layer: Sequence[float]) -> Tensor:
        values = torch.tensor(per_layer, dtype=dtype).repeat_interleave(channels)
        return values.to(device, non_blocking=True)  # otherwise the host would wait for the device

    def join(statistics: Iterable[list[Tensor]]) -> list[Tensor]:
        return [torch.cat([one.to(device) for one in kind]).to(dtype) for kind in zip(*statistics, strict=True)]

    state: list[Tensor] = []
    for call in range(calls):
        callers = [next(index for index in active if call < len(layer.calls[index])) for layer in layers]
        firsts = [layer.calls[index][call] for layer, index in zip(layers, callers, strict=True)]
        momentum = spread([first.momentum for first in firsts])
        state = state or join(first.before for first in firsts)
        chunks: list[tuple[Tensor, Tensor, Tensor]] = []
        for index in active:
            made = [call < len(layer.calls[index]) for layer in layers]
            # Another replica's call stands in for a call that a replica has not made, with no values.
            sources = [
                (layer, index if own else caller) for layer, own, caller in zip(layers, made, callers, strict=True)
            ]
            seen = [layer.calls[source][call] for layer, source in sources]
            values = spread([one.values if own else 0 for one, own in zip(seen, made, strict=True)])
            before = join(one.before for one in seen)
            after = join(layer.after(source, call) for layer, source in sources)
            mean, variance = ((new - (1 - momentum) * old) / momentum for old, new in zip(before, after, strict=True))
            chunks.append((values, mean, variance))
        total = torch.stack([n for n, _, _ in chunks]).sum(0)
        mean = torch.stack([n / total * own for n, own, _ in chunks]).sum(0)
        squares = [torch.where(n > 0, (n - 1) * var + n * (own - mean) ** 2, 0.0) for n, own, var in chunks]
        variance = torch.stack(squares).sum(0) / (total - 1)
        state = [(1 - momentum) * old + momentum * new for old, new in zip(state, (mean, variance), strict=True)]
    for kind, vector in enumerate(state):
        for layer, part in zip(layers, torch.split(vector, channels.tolist()), strict=True):
            _statistics(layer.master)[kind].copy_(part)


def _momentum(layer: Any) -> float:
    """Return the weight of the next call in the running statistics; without a momentum they are a cumulative mean."""
    if layer.momentum is not None:
        return float(layer.momentum)
    return 0.0 if layer.num_batches_tracked is None else 1.0 / (int(layer.num_batches_tracked) + 1)

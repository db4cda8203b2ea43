"""Bringing buffers that replicas have changed back together."""

import warnings
from collections.abc import Sequence, Set

import torch
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import BatchNorm, Normalisation
from lightning_ddp_ext.parallel.replicas.replicas import Replicas
from lightning_ddp_ext.parallel.replicas.sample_counters import SampleCounters


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


def same_values(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same values; nan equals nan."""
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _write_mean(buffer: Tensor, values: Sequence[Tensor], factors: Sequence[float]) -> None:
    mean = torch.zeros_like(buffer)
    untouched = torch.ones_like(buffer, dtype=torch.bool)
    for value, factor in zip(values, factors, strict=True):
        mean.add_(value, alpha=factor)
        untouched &= (value == buffer) | ((value != value) & (buffer != buffer))
    # Elements that nobody has changed keep every bit, infinities among them.
    buffer.copy_(torch.where(untouched, buffer, mean))

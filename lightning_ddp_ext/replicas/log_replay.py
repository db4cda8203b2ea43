"""`self.log` in a step that several replicas run ends as one call, with one value for the whole batch."""

import inspect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor
from torchmetrics import Metric

from lightning_ddp_ext.replicas.metric_merger import MetricMerger
from lightning_ddp_ext.replicas.replica import Replicas

_LOG = inspect.signature(LightningModule.log)


@dataclass(slots=True)
class _Logged:
    weight: float
    size: int
    value: Any
    options: dict[str, Any]


class LogReplay:
    """Records `log` on the replicas and repeats it once per key on the master, after the step.

    `log_dict` arrives here key by key. Without `reduce_fx`, values are averaged by weight, except for whole numbers
    that count samples of each chunk: integer tensors, and Python's integers if they differ or equal the chunk sizes.
    """

    def __init__(self, replicas: Replicas, metrics: MetricMerger) -> None:
        self._master: LightningModule = replicas.master  # type: ignore[assignment]
        self._metrics = metrics
        self._home = replicas[0].device
        # Keys logged with the batch size of the whole batch, with that size: it may also be the size of a small chunk.
        self._whole_batch_sizes: set[tuple[str, int]] = set()
        # Keys logged with different batch sizes at once: each chunk's size, also where the sizes agree by chance.
        self._own_sizes: set[str] = set()
        # Keys of Python's integers that have differed between replicas, and keys that were equal on all replicas
        # without being chunk sizes. A later epoch number may equal a chunk size by chance.
        self._counts: set[str] = set()
        self._constants: set[str] = set()
        self._warnings = WarningCache()
        self._recorded = [_Recorder(replica.module) for replica in replicas]

    def replay(self, active: Sequence[int], weights: Sequence[float], sizes: Sequence[int]) -> None:
        """Log every key that the active replicas have recorded once; their chunks have these weights and sizes."""
        if not any(recorded.calls for recorded in self._recorded):
            return
        grouped: dict[tuple[str, int], list[_Logged]] = {}
        for index, weight, size in zip(active, weights, sizes, strict=True):
            occurrence: Counter[str] = Counter()
            for name, value, options in self._recorded[index].calls:
                grouped.setdefault((name, occurrence[name]), []).append(_Logged(weight, size, value, options))
                occurrence[name] += 1
            self._recorded[index].calls.clear()
        for (name, _), logged in grouped.items():
            if isinstance(logged[0].value, Metric):
                self._master.log(name, self._metrics.original(logged[0].value), **logged[0].options)
            else:
                self._log_value(name, logged)

    def _log_value(self, name: str, logged: Sequence[_Logged]) -> None:
        # A chunk of zero weight may have logged a mean over nothing.
        logged = [entry for entry in logged if entry.weight] or logged
        batch_sizes = [entry.options.get("batch_size") for entry in logged]
        weights, sizes = [entry.weight for entry in logged], [entry.size for entry in logged]
        own_weights, batch_size = self._interpret(name, batch_sizes, sizes, weights)
        options = {**logged[0].options, "batch_size": batch_size}
        values = [entry.value for entry in logged]
        value = self._metrics.of_whole_batch(values[0])
        if value is None and len(values) > 1 and all(map(_is_number, values)):
            reduction = _reduction(options) or self._default_reduction(name, values, sizes)
            value = _combine(values, own_weights or weights, reduction, self._home)
        # Lightning refuses anything but one number, and names the key.
        self._master.log(name, values[0] if value is None else value, **options)

    def _default_reduction(self, name: str, values: Sequence[Any], chunk_sizes: Sequence[int]) -> str:
        if not all(map(_is_whole, values)):
            return "mean"
        if any(isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool for value in values):
            if len(set(map(bool, values))) > 1:
                self._warn(
                    name,
                    "is True on some replicas and False on others: their mean is logged. Pass"
                    ' `reduce_fx="max"` if one True is enough, or `reduce_fx="min"` if all must be True.',
                )
            return "mean"
        if not self._are_counts(name, values, chunk_sizes):
            return "mean"
        self._warn(
            name,
            "logs whole numbers without `reduce_fx`: they are taken for counts of the replicas' chunks and added up."
            " Log a float if it is one value for the whole batch or a mean, or pass `reduce_fx`.",
        )
        return "sum"

    def _are_counts(self, name: str, values: Sequence[Any], chunk_sizes: Sequence[int]) -> bool:
        if any(isinstance(value, Tensor) for value in values):
            return True
        are_sizes = list(values) == list(chunk_sizes)
        if len(set(values)) > 1:
            self._counts.add(name)
        elif not are_sizes:
            self._constants.add(name)
        return name in self._counts or (are_sizes and name not in self._constants)

    def _warn(self, name: str, what: str) -> None:
        self._warnings.warn(f"`self.log({name!r}, ...)` {what}")

    def _interpret(
        self, name: str, batch_sizes: Sequence[int | None], chunk_sizes: Sequence[int], weights: Sequence[float]
    ) -> tuple[list[float] | None, int]:
        """Return each value's weight in the mean, None for the chunk's weight, and the batch size to log with."""
        given = [size for size in batch_sizes if size is not None]
        if len(given) < len(batch_sizes):
            return None, sum(chunk_sizes)
        same = len(set(given)) == 1
        if not same:
            self._own_sizes.add(name)
        known = (name, given[0]) in self._whole_batch_sizes
        if given == list(chunk_sizes) and not (same and known):
            return None, sum(chunk_sizes)
        # If all chunks have the same weight, the same number may be the size of each chunk.
        plausible = known or len(given) == 1 or len(set(weights)) > 1 or given[0] in (1, sum(chunk_sizes))
        if same and plausible and name not in self._own_sizes:
            # The same number on every replica is the whole batch's, such as `hparams.batch_size`.
            self._whole_batch_sizes.add((name, given[0]))
            return None, given[0]
        return [float(size) for size in given], int(sum(given))


class _Recorder:
    """Takes the place of `log` and `log_dict` on one replica."""

    def __init__(self, module: Any) -> None:
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []
        self._log_dict = module.log_dict
        self._log_dict_signature = inspect.signature(module.log_dict)
        self._has_default_reduction = False
        module.__dict__.update(log=self.log, log_dict=self.log_dict)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            bound = _LOG.bind(None, name, value, *args, **kwargs).arguments
            kwargs = {key: item for key, item in bound.items() if key not in ("self", "name", "value")}
        if self._has_default_reduction and kwargs.get("reduce_fx") == "mean":
            del kwargs["reduce_fx"]
        keeps_graph = kwargs.get("enable_graph", False)
        self.calls.append((name, value.detach() if isinstance(value, Tensor) and not keeps_graph else value, kwargs))

    def log_dict(self, *args: Any, **kwargs: Any) -> None:
        # Lightning's `log_dict` gives `log` its own default, which is then no choice of the user.
        given = {**kwargs, **self._log_dict_signature.bind(*args, **kwargs).arguments}
        before, self._has_default_reduction = self._has_default_reduction, "reduce_fx" not in given
        try:
            self._log_dict(*args, **kwargs)
        finally:
            self._has_default_reduction = before


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)


def _is_whole(value: Any) -> bool:
    return not value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, Integral)


def _reduction(options: dict[str, Any]) -> str | None:
    """Return the name of the reduction that a value is logged with, or None if the user has not chosen one."""
    if "reduce_fx" not in options:
        return None
    reduce_fx = options["reduce_fx"]
    name: str = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx.__name__
    return "mean" if name == "avg" else name


def _combine(values: Sequence[Any], weights: Sequence[float], reduction: str, device: torch.device) -> Any:
    if not any(isinstance(value, Tensor) for value in values):
        numbers = [torch.tensor(float(value), dtype=torch.float64) for value in values]
        return float(_combine(numbers, weights, reduction, torch.device("cpu")))
    # Without waiting for devices: a number becomes a tensor there, and weights stay numbers.
    stacked = torch.stack(
        [
            value.to(device, non_blocking=True).squeeze()
            if isinstance(value, Tensor)
            else torch.full((), value, device=device)
            for value in values
        ]
    )
    if not stacked.is_floating_point():
        stacked = stacked.to(torch.get_default_dtype())
    if reduction == "sum":
        return stacked.sum(0)
    if reduction in ("max", "min"):
        return stacked.amax(0) if reduction == "max" else stacked.amin(0)
    total = sum(weights) or math.nan
    wide = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
    mean = torch.stack([value * (weight / total) for value, weight in zip(wide, weights, strict=True)]).sum(0)
    return mean.clamp(stacked.amin(0), stacked.amax(0))  # the mean of equal values is that value, in every digit

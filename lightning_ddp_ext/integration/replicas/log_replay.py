"""`self.log` in a step that several replicas run ends as one call, with one value for the whole batch."""

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_ddp_ext.integration.replicas.metric_folding import MetricFolder
from lightning_ddp_ext.parallel.replicas.replicas import Replicas

_SIGNATURE = inspect.signature(LightningModule.log)


@dataclass(slots=True)
class _Logged:
    replica: int
    value: Any
    options: dict[str, Any]


class LogReplay:
    """Records `log` on the replicas and repeats it once per key on the master, after the step.

    Overrides of `log` run once, with the value of the whole batch. `log_dict` arrives here key by key.

    Args:
        replicas: The replicas, just built.
        metrics: Knows the master's metric for each replica's.
    """

    def __init__(self, replicas: Replicas, metrics: MetricFolder) -> None:
        self._master: LightningModule = replicas.master  # type: ignore[assignment]
        self._metrics = metrics
        self._home = replicas[0].device
        # Keys that were logged with a batch size of the whole batch, and which: on a small chunk it may be the chunk's.
        self._whole_batch_sizes: set[tuple[str, int]] = set()
        # Keys that were logged with different batch sizes at once: the chunks' own, also where they agree by chance.
        self._own_sizes: set[str] = set()
        self._recorded: list[list[tuple[str, Any, dict[str, Any]]]] = [[] for _ in replicas]
        for replica, recorded in zip(replicas, self._recorded, strict=True):
            replica.module.__dict__["log"] = _recorder(recorded)

    def replay(self, active: Sequence[int], sizes: Sequence[int], weights: Sequence[float]) -> None:
        """Log every recorded key once.

        Args:
            active: Indices of the replicas that ran the step, in order.
            sizes: Chunk size of each of them.
            weights: What each of their chunks counts in a mean.
        """
        grouped: dict[tuple[str, int], list[_Logged]] = {}
        for index in active:
            occurrence: Counter[str] = Counter()
            for name, value, options in self._recorded[index]:
                grouped.setdefault((name, occurrence[name]), []).append(_Logged(index, value, options))
                occurrence[name] += 1
            self._recorded[index].clear()
        size_of = dict(zip(active, sizes, strict=True))
        weight_of = dict(zip(active, weights, strict=True))
        for (name, _), logged in grouped.items():
            if isinstance(logged[0].value, Metric):
                self._master.log(name, self._metrics.original(logged[0].value), **logged[0].options)
                continue
            # A chunk that counts nothing may have logged a mean over nothing.
            counted = [entry for entry in logged if weight_of[entry.replica]] or logged
            given = [entry.options.get("batch_size") for entry in counted]
            counts, batch_size = self._interpret(
                name,
                given,
                [size_of[entry.replica] for entry in counted],
                [weight_of[entry.replica] for entry in counted],
            )
            weights_of_values = counts or [weight_of[entry.replica] for entry in counted]
            options = {**counted[0].options, "batch_size": batch_size}
            values = [entry.value for entry in counted]
            reduction = _reduction(options)
            if reduction == "mean" and _are_counts(values, [size_of[entry.replica] for entry in counted]):
                reduction = "sum"
            value = self._metrics.of_whole_batch(values[0])
            if value is None:
                value = _combine(values, weights_of_values, reduction, self._home)
            self._master.log(name, value, **options)

    def _interpret(
        self, name: str, batch_sizes: Sequence[int | None], chunk_sizes: Sequence[int], weights: Sequence[float]
    ) -> tuple[list[float] | None, int]:
        """Interpret the `batch_size` that replicas logged with.

        Returns:
            What each value counts in the mean (None: what its chunk counts), and the batch size to log with.
        """
        given = [size for size in batch_sizes if size is not None]
        if len(given) < len(batch_sizes):
            return None, sum(chunk_sizes)
        same = len(set(given)) == 1
        if not same:
            self._own_sizes.add(name)
        known = (name, given[0]) in self._whole_batch_sizes
        if given == list(chunk_sizes) and not (same and known):
            return None, sum(chunk_sizes)
        # Where every chunk counts the same, the same number may be each chunk's own.
        plausible = known or len(given) == 1 or len(set(weights)) > 1 or given[0] in (1, sum(chunk_sizes))
        if same and plausible and name not in self._own_sizes:
            # The same number on every replica is that of the whole batch, such as `hparams.batch_size`.
            self._whole_batch_sizes.add((name, given[0]))
            return None, given[0]
        return [float(size) for size in given], int(sum(given))


def _recorder(recorded: list[tuple[str, Any, dict[str, Any]]]) -> Any:
    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            bound = _SIGNATURE.bind(None, name, value, *args, **kwargs).arguments
            kwargs = {key: item for key, item in bound.items() if key not in ("self", "name", "value")}
        keeps_graph = kwargs.get("enable_graph", False)
        recorded.append((name, value.detach() if isinstance(value, Tensor) and not keeps_graph else value, kwargs))

    return log


def _are_counts(values: Sequence[Any], chunk_sizes: Sequence[int]) -> bool:
    """Tell whole numbers that were counted in each chunk from those that mean the same on every replica."""
    if all(isinstance(value, Tensor) for value in values):
        return not any(value.is_floating_point() for value in values)
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return False
    return list(values) == list(chunk_sizes) or len(set(values)) > 1


def _reduction(options: dict[str, Any]) -> str:
    """Name of the reduction that a value is logged with."""
    reduce_fx = options.get("reduce_fx", "mean")
    name: str = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx.__name__
    return "mean" if name == "avg" else name


def _combine(values: Sequence[Any], weights: Sequence[float], reduction: str, device: torch.device) -> Any:
    if len(values) == 1:
        return values[0]
    if not any(isinstance(value, Tensor) for value in values):
        numbers = [torch.tensor(float(value), dtype=torch.float64) for value in values]
        return float(_combine(numbers, weights, reduction, torch.device("cpu")))
    stacked = torch.stack([torch.as_tensor(value).to(device).squeeze() for value in values])
    if not stacked.is_floating_point():
        stacked = stacked.to(torch.get_default_dtype())
    if reduction == "sum":
        return stacked.sum(0)
    if reduction in ("max", "min"):
        return stacked.amax(0) if reduction == "max" else stacked.amin(0)
    factors = torch.tensor(weights, dtype=torch.promote_types(stacked.dtype, torch.float32), device=device)
    return (stacked * (factors / factors.sum())).sum(0)

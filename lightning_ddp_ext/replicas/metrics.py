"""Metrics and logged values of the replicas, merged as if one device had computed the whole batch."""

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from numbers import Integral, Real
from typing import Any

import torch
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor, nn
from torchmetrics import MaxMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from lightning_ddp_ext._compat.torchmetrics import (
    State,
    compute_over,
    last_forward_value,
    read_state,
    record_calls,
    reductions,
    restore_compute_groups,
    set_forward_value,
    take_dtype,
    write_state,
)
from lightning_ddp_ext._lightning import LightningModule
from lightning_ddp_ext.batches.containers import to_device, values_of, walk, with_values
from lightning_ddp_ext.batches.splitting import merge
from lightning_ddp_ext.replicas.replica import Replicas

_OF_NUMBERS = (SumMetric, MaxMetric, MinMetric)
_MERGEABLE = (dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min)


def has_mergeable_state(metric: Metric) -> bool:
    """Return True if the state over a batch follows from the states over its chunks."""
    wraps_metrics = any(isinstance(child, Metric | MetricCollection) for child in metric.children())
    by_state = reductions(metric)
    return (
        bool(by_state)
        and metric.full_state_update is not True
        and not wraps_metrics
        and all(reduction in _MERGEABLE for reduction in by_state.values())
    )


def merge_states(metric: Metric, states: Sequence[State]) -> State:
    """Merge states in the given order, each by its reduction."""
    # The public `Metric.merge_state` refuses `full_state_update`, puts incoming list entries first, does not update the
    # update count, and divides by it for means.
    by_state = reductions(metric)
    return {name: _reduce(reduction, [state[name] for state in states]) for name, reduction in by_state.items()}


def _reduce(reduction: Any, values: list[Any]) -> Tensor | list[Tensor]:
    if any(isinstance(value, list) for value in values):
        return [item for value in values for item in (value if isinstance(value, list) else [value])]
    if reduction is dim_zero_cat:
        return torch.cat(values)
    # States of `R2Score` and others start as one number and get one per output in the first update.
    shape = max((value.shape for value in values), key=len)
    stacked = torch.stack([value.expand(shape) if value.ndim == 0 else value for value in values])
    if reduction is dim_zero_sum:
        return stacked.sum(0)
    return stacked.amax(0) if reduction is dim_zero_max else stacked.amin(0)


def _is_scalar(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.ndim == 0) or (
        isinstance(value, int | float) and not isinstance(value, bool)
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, Tensor) and not value.is_floating_point())


class _CannotJoinError(Exception):
    """No argument for the whole batch can be made of the replicas' arguments."""


class _Call:
    """A call of a replica's metric."""

    def __init__(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.method, self.args, self.kwargs = method, args, kwargs
        self.returned: Any = None

    def pass_on(self, returned: Any) -> Any:
        """Keep what the call returns, with separate memory for each tensor, by which it is recognised later."""
        self.returned = _with_own_memory(returned)
        return self.returned

    @property
    def scalars(self) -> list[Any]:
        return [value for value in (*self.args, *self.kwargs.values()) if _is_scalar(value)]


class _ReplicatedMetric:
    """A metric of the master, its copies, and their calls in a step."""

    def __init__(self, metric: Metric, replicas: Replicas, depths: Sequence[list[int]], is_held: bool) -> None:
        self.metric = metric
        self.copies: list[Metric] = [replica.references.find(metric) for replica in replicas]  # type: ignore[misc]
        # Another metric that holds this one may add to its state.
        self.is_mergeable = has_mergeable_state(metric) and not is_held
        self.calls: list[list[_Call]] = [[] for _ in replicas]
        self._depths = depths
        for calls, copied, depth in zip(self.calls, self.copies, depths, strict=True):
            record_calls(copied, partial(_record, calls), depth)

    def empty(self, index: int) -> None:
        """Reset a replica's metric, without recording a call of it or of the metrics that it holds."""
        self._depths[index][0] += 1
        self.copies[index].reset()
        self._depths[index][0] -= 1
        take_dtype(self.copies[index], self.metric)
        self.calls[index].clear()


def _record(calls: list[_Call], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    calls.append(_Call(method, args, kwargs))
    return calls[-1].pass_on


class MetricMerger:
    """Merges the updates of replicas' metrics in one step into the master's metrics, and empties the replicas'.

    States that follow from the chunks' states are merged in the order of the replicas. Other metrics, and calls whose
    only scalars are floating-point numbers, presumably means of a chunk, are repeated on the master with joined
    arguments, or once per replica if they cannot be joined.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._home = replicas[0].device
        # Steps call a metric inside another metric only if a module holds it as well.
        modules = [module for module in replicas.master.modules() if not isinstance(module, Metric)]
        metrics = {id(child): child for module in modules for child in module.children() if isinstance(child, Metric)}
        depths: list[list[int]] = [[0] for _ in replicas]
        held = {id(part) for metric in metrics.values() for part in metric.modules() if part is not metric}
        self._metrics = [_ReplicatedMetric(one, replicas, depths, id(one) in held) for one in metrics.values()]
        self._collections = [m for m in replicas.master.modules() if isinstance(m, MetricCollection)]
        self._originals = {id(copied): one.metric for one in self._metrics for copied in one.copies}
        self._returned: list[tuple[Tensor, Tensor]] = []
        _warn_of_unregistered(replicas.master)

    def original(self, metric: Metric) -> Metric:
        """Return the master's metric for a replica's."""
        return self._originals.get(id(metric), metric)

    def of_whole_batch(self, value: Any) -> Tensor | None:
        """Return the whole batch's value for one that a replica's `forward` has returned, or its element; else None."""
        for chunk, whole in self._returned if isinstance(value, Tensor) else ():
            if chunk.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
                return whole.as_strided(value.shape, value.stride(), value.storage_offset())
        return None

    def merge(self, active: Sequence[int], weights: Sequence[float], sizes: Sequence[int]) -> None:
        """Merge what a step has added on the active replicas, whose chunks have these weights and sizes."""
        called_any = False
        self._returned.clear()
        for one in self._metrics:
            chunks = zip(active, weights, sizes, strict=True)
            called = [(index, weight, size) for index, weight, size in chunks if one.calls[index]]
            if not called:
                continue
            called_any = True
            indices, called_weights, called_sizes = zip(*called, strict=True)
            if one.is_mergeable and _states_suffice(one.metric, [one.calls[index] for index in indices]):
                self._merge_states(one, indices)
            else:
                self._repeat_calls(one, indices, called_weights, called_sizes)
            for index in indices:
                one.empty(index)
        if called_any:
            for collection in self._collections:
                updated_only = all(last_forward_value(metric) is None for metric in collection.values(copy_state=False))
                restore_compute_groups(collection, form=updated_only)

    def _merge_states(self, one: _ReplicatedMetric, indices: Sequence[int]) -> None:
        metric, copies = one.metric, [one.copies[index] for index in indices]
        batch = merge_states(metric, [to_device(read_state(copied), self._home) for copied in copies])
        if any(last_forward_value(copied) is not None for copied in copies):
            value = compute_over(metric, batch)
            set_forward_value(metric, value)
            self._pair([one.calls[index][0] for index in indices], value)
        updates = max(len(one.calls[index]) for index in indices)
        write_state(metric, merge_states(metric, [read_state(metric), batch]), updates)

    def _repeat_calls(
        self, one: _ReplicatedMetric, indices: Sequence[int], weights: Sequence[float], sizes: Sequence[int]
    ) -> None:
        by_replica = [one.calls[index] for index in indices]
        # A number is one value of the chunk for these, and not a mean.
        has_values = isinstance(one.metric, _OF_NUMBERS) and any(call.scalars for call in by_replica[0])
        try:
            if has_values or len({tuple(call.method for call in calls) for calls in by_replica}) > 1:
                raise _CannotJoinError
            groups = list(zip(*by_replica, strict=True))
            arguments = [_join_arguments(group, weights, sizes, self._home) for group in groups]
        except _CannotJoinError:
            for call in chain.from_iterable(by_replica):
                args, kwargs = to_device((call.args, call.kwargs), self._home)
                getattr(one.metric, call.method)(*args, **kwargs)
            return
        for group, (args, kwargs) in zip(groups, arguments, strict=True):
            self._pair(group, getattr(one.metric, group[0].method)(*args, **kwargs))

    def _pair(self, calls: Sequence[_Call], whole: Any) -> None:
        """Remember the values that replicas' calls returned beside the value of the same call for the whole batch."""
        wholes = _tensors(_with_own_memory(whole))
        for call in calls:
            parts = _tensors(call.returned)
            if [part.shape for part in parts] == [value.shape for value in wholes]:
                self._returned.extend(zip(parts, wholes, strict=True))


def _warn_of_unregistered(master: nn.Module) -> None:
    registered = set(map(id, master.modules()))
    for path, module in master.named_modules():
        for name, value in vars(module).items():
            held = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
            if any(isinstance(item, Metric | MetricCollection) and id(item) not in registered for item in held):
                warnings.warn(
                    f"`self.{path + '.' if path else ''}{name}` holds a metric that is no submodule, so all replicas"
                    " update the same one at the same time. Use `nn.ModuleList` or `nn.ModuleDict` instead.",
                    stacklevel=2,
                )


def _with_own_memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    return with_values(value, [*map(_with_own_memory, values_of(value))])


def _tensors(value: Any) -> list[Tensor]:
    return [part for part in walk(value) if isinstance(part, Tensor)]


def _states_suffice(metric: Metric, by_replica: Sequence[Sequence[_Call]]) -> bool:
    """Return True if the state and the last value over the batch follow from the states of the chunks."""
    calls = [call for calls in by_replica for call in calls]
    was_reset = any(call.method == "reset" for call in calls)
    # After several calls of `forward`, the merged state does not give the value of the last call.
    has_one_value = len(calls) == len(by_replica) or all(call.method == "update" for call in calls)
    scalars = [value for call in calls for value in call.scalars]
    # A floating-point number is the mean of a chunk, unless a whole number beside it says of how many values.
    is_value = not scalars or isinstance(metric, _OF_NUMBERS) or any(map(_is_whole, scalars))
    return has_one_value and not was_reset and is_value


def _join_arguments(
    calls: Sequence[_Call], weights: Sequence[float], sizes: Sequence[int], device: torch.device
) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments for the whole batch: rows are concatenated, means averaged by weight."""
    kinds = {_is_whole(value) for call in calls for value in call.scalars}
    if len(kinds) > 1:  # sums, and the number of their terms
        raise _CannotJoinError
    factors = [weight / (sum(weights) or 1.0) for weight in weights]

    def join(values: Sequence[Any], _: Sequence[int], path: str) -> Any:
        first = values[0]
        if all(map(_is_scalar, values)) and not any(map(_is_whole, values)):
            return sum(value * factor for value, factor in zip(values, factors, strict=True) if factor)
        if isinstance(first, Tensor) and first.ndim:
            return torch.cat([*values])
        if isinstance(first, list) and not any(isinstance(item, Tensor) for value in values for item in value):
            return [item for value in values for item in value]
        # Equal texts may be two samples, except options, and equal numbers the samples of two chunks.
        is_option = not isinstance(first, str) or not path.startswith("['args']")
        if is_option and list(values) != list(sizes) and all(value is first or value == first for value in values):
            return first
        raise _CannotJoinError

    given = [to_device({"args": dict(enumerate(call.args)), **call.kwargs}, device) for call in calls]
    if any(isinstance(one, list) and any(isinstance(item, Tensor) for item in one) for one in walk(given)):
        raise _CannotJoinError  # a list of columns or of samples
    with torch.no_grad():
        kwargs = merge(given, sizes, 0, join)
    return [*kwargs.pop("args").values()], kwargs


_LOG = inspect.signature(LightningModule.log)


@dataclass(slots=True)
class _Logged:
    weight: float
    size: int
    value: Any
    options: dict[str, Any]


class LogReplay:
    """Records `log` on the replicas and repeats it once per key on the master, after the step.

    `log_dict` arrives here key by key. Values are combined by the `reduce_fx` of the call. In a mean they have the
    weights of the chunks' losses, or the batch sizes of the calls if these are not the chunks' sizes.
    """

    def __init__(self, replicas: Replicas, metrics: MetricMerger) -> None:
        self._master: LightningModule = replicas.master  # type: ignore[assignment]
        self._metrics = metrics
        self._home = replicas[0].device
        self._warnings = WarningCache()
        self._calls: list[list[tuple[str, Any, dict[str, Any]]]] = [[] for _ in replicas]
        for replica, calls in zip(replicas, self._calls, strict=True):
            replica.module.__dict__["log"] = partial(_record_log, calls)

    def replay(self, active: Sequence[int], weights: Sequence[float], sizes: Sequence[int]) -> None:
        """Log every key that the active replicas have recorded once; their chunks have these weights and sizes."""
        grouped: dict[tuple[str, int], list[_Logged]] = {}
        for index, weight, size in zip(active, weights, sizes, strict=True):
            occurrence: Counter[str] = Counter()
            for name, value, options in self._calls[index]:
                grouped.setdefault((name, occurrence[name]), []).append(_Logged(weight, size, value, options))
                occurrence[name] += 1
            self._calls[index].clear()
        for (name, _), logged in grouped.items():
            if isinstance(logged[0].value, Metric):
                self._master.log(name, self._metrics.original(logged[0].value), **logged[0].options)
            else:
                self._log_value(name, logged)

    def _log_value(self, name: str, logged: Sequence[_Logged]) -> None:
        # A chunk of zero weight may have logged a mean over nothing.
        logged = [entry for entry in logged if entry.weight] or logged
        values, sizes = [entry.value for entry in logged], [entry.size for entry in logged]
        given = [entry.options["batch_size"] for entry in logged if entry.options.get("batch_size") is not None]
        batch_sizes = [*map(int, given)] if len(given) == len(sizes) else sizes
        value = self._metrics.of_whole_batch(values[0])
        if value is None and len(values) > 1 and all(map(_is_number, values)):
            reduction = _reduction(logged[0].options)
            if reduction == "mean":
                self._warn_of_mean(name, values, batch_sizes, sizes)
            weights = [entry.weight for entry in logged] if batch_sizes == sizes else batch_sizes
            value = _combine(values, weights, reduction, self._home)
        # Lightning refuses anything but one number, and names the key.
        options = {**logged[0].options, "batch_size": sum(batch_sizes)}
        self._master.log(name, values[0] if value is None else value, **options)

    def _warn_of_mean(self, name: str, values: Sequence[Any], batch_sizes: list[int], sizes: list[int]) -> None:
        if all(not one.is_floating_point() if isinstance(one, Tensor) else isinstance(one, Integral) for one in values):
            self._warnings.warn(
                f"`self.log({name!r}, ...)` logs the mean over the replicas of whole numbers or truth values. Pass"
                ' `reduce_fx="sum"` if they count something in each chunk, "max" or "min"; or log a float if the mean'
                " is meant, or one value for the whole batch."
            )
        if len({*batch_sizes}) == 1 < len({*sizes}):
            self._warnings.warn(
                f"`self.log({name!r}, ...)` gives chunks of different sizes the same weight in the mean, because every"
                " replica passes the same `batch_size`. Pass the number of samples in the chunk, or leave it out."
            )


def _record_log(calls: list[Any], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """Take the place of `log` on one replica."""
    if args:
        bound = _LOG.bind(None, name, value, *args, **kwargs).arguments
        kwargs = {key: item for key, item in bound.items() if key not in ("self", "name", "value")}
    keeps_graph = kwargs.get("enable_graph", False)
    calls.append((name, value.detach() if isinstance(value, Tensor) and not keeps_graph else value, kwargs))


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)


def _reduction(options: dict[str, Any]) -> str:
    """Return the name of the reduction that a value is logged with."""
    reduce_fx = options.get("reduce_fx", "mean")
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

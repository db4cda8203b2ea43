"""Metrics that several replicas update."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MaxMetric, Metric, MetricCollection, MinMetric, SumMetric

from lightning_ddp_ext._compat.torch import HOOKS
from lightning_ddp_ext._compat.torchmetrics import (
    compute_over,
    forget_compute_groups,
    has_mergeable_state,
    last_forward_value,
    merge_states,
    move_keeping_dtype,
    read_state,
    record_calls,
    restore_compute_groups,
    set_forward_value,
    take_dtype,
    write_state,
)
from lightning_ddp_ext.batches.containers import items, map_items, to_device
from lightning_ddp_ext.replicas.replica import Replicas


def is_scalar(value: Any) -> bool:
    """Tell whether an argument is one number."""
    return (isinstance(value, Tensor) and value.ndim == 0) or (
        isinstance(value, int | float) and not isinstance(value, bool)
    )


def is_whole(value: Any) -> bool:
    """Tell whether a number is a whole one."""
    return isinstance(value, int) or (isinstance(value, Tensor) and not value.is_floating_point())


def can_join(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Tell whether what each replica has given makes what one call is given; `sizes` are those of the chunks."""
    first = values[0]
    if isinstance(first, dict):
        return all(value.keys() == first.keys() for value in values) and all(
            can_join([value[key] for value in values], sizes) for key in first
        )
    if isinstance(first, tuple):
        return len(set(map(len, values))) == 1 and all(can_join(items, sizes) for items in zip(*values, strict=True))
    if isinstance(first, list):
        has_tensors = any(isinstance(item, Tensor) for value in values for item in value)
        return not has_tensors or _are_columns(values, sizes) or list(map(len, values)) == list(sizes)
    # Equal texts may be two samples.
    is_joined = isinstance(first, Tensor) or is_scalar(first)
    return is_joined or (not isinstance(first, str) and all(value is first for value in values))


def join(values: Sequence[Any], weights: Sequence[float], sizes: Sequence[int], device: torch.device) -> Any:
    """Make one argument of those of the replicas.

    Args:
        values: What each replica has given.
        weights: What each of their chunks counts.
        sizes: Samples in each of them.
        device: Where the argument is needed.

    Returns:
        Tensors and lists are concatenated, lists of columns column by column, floating-point scalars averaged by
        weight, whole numbers that were counted are added; of anything else the first.
    """
    first = values[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat([value.detach().to(device) for value in values])
    if is_scalar(first):
        return _join_scalars(to_device(list(values), device), weights, sizes)
    if isinstance(first, dict):
        return {key: join([value[key] for value in values], weights, sizes, device) for key in first}
    if isinstance(first, tuple):
        return tuple(join(items, weights, sizes, device) for items in zip(*values, strict=True))
    if isinstance(first, list):
        if _are_columns(values, sizes):
            return [join(items, weights, sizes, device) for items in zip(*values, strict=True)]
        return [to_device(item, device) for value in values for item in value]
    return first


def _are_columns(lists: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    """Return True if lists hold tensors with a row per sample, such as `[target, weight]`; a weight may be None."""

    def has_row_per_sample(items: tuple[Any, ...]) -> bool:
        return all(
            isinstance(item, Tensor) and item.ndim > 0 and item.size(0) == size
            for item, size in zip(items, sizes, strict=True)
        )

    if len(set(map(len, lists))) > 1:
        return False
    columns = [items for items in zip(*lists, strict=True) if any(item is not None for item in items)]
    return bool(columns) and all(map(has_row_per_sample, columns))


def _join_scalars(values: Sequence[Any], weights: Sequence[float], sizes: Sequence[int]) -> Any:
    values = [value.detach() if isinstance(value, Tensor) else value for value in values]
    first = values[0]
    if isinstance(first, Tensor):
        if not first.is_floating_point():
            return torch.stack(values).sum()
    elif isinstance(first, int):
        was_counted = list(values) == list(sizes) or len(set(values)) > 1
        return sum(values) if was_counted else first
    return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight) / (sum(weights) or 1)


def copy_metric(module: nn.Module, device: torch.device) -> nn.Module | None:
    """Copy a metric for a replica, whole: its `update` is bound to the instance and would update the original.

    Args:
        module: Any module.
        device: Device of the replica.

    Returns:
        An empty copy on the device, or None if the module is not a metric.
    """
    if not isinstance(module, Metric | MetricCollection):
        return None
    # Hooks are shared: what they are bound to may lead to everything, to the Trainer too.
    hooks = [part.__dict__[name] for part in module.modules() for name in HOOKS]
    metric = move_keeping_dtype(copy.deepcopy(module, {id(shared): shared for shared in hooks}), device)
    if isinstance(metric, MetricCollection):
        forget_compute_groups(metric)
    metric.reset()
    return metric


@dataclass(slots=True)
class _Call:
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    returned: Any = None

    def pass_on(self, returned: Any) -> Any:
        """Keep what the call returns. Each tensor gets a memory of its own, by which it is recognised."""
        self.returned = _with_own_memory(returned)
        return self.returned

    @property
    def scalars(self) -> list[Any]:
        return [value for value in (*self.args, *self.kwargs.values()) if is_scalar(value)]


@dataclass(slots=True)
class _Entry:
    metric: Metric
    copies: list[Metric]
    depths: Sequence[list[int]]
    is_held: bool
    calls: list[list[_Call]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = [[] for _ in self.copies]
        for calls, copied, depth in zip(self.calls, self.copies, self.depths, strict=True):
            record_calls(copied, partial(_record, calls), depth)

    def empty(self, index: int) -> None:
        """Let a replica begin anew, which is no call of its own, nor of the metrics inside."""
        self.depths[index][0] += 1
        self.copies[index].reset()
        self.depths[index][0] -= 1
        take_dtype(self.copies[index], self.metric)
        self.calls[index].clear()


def _record(calls: list[_Call], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    calls.append(_Call(method, args, kwargs))
    return calls[-1].pass_on


class MetricFolder:
    """Folds what replicas' metrics saw in one step into the master's metrics, and empties them.

    States that follow from the chunks' states (sums, concatenations, maxima and minima) are merged in the order of the
    replicas. Every other metric - and a call whose only scalars are floating-point numbers, which are means of a chunk
    as a rule - is given the replicas' arguments once more, joined to those of the whole batch: tensors and lists are
    concatenated, lists of columns column by column, floating-point scalars are averaged by weight, whole numbers that
    were counted are added. What cannot be joined, such as texts, is given one replica after the other.

    What `forward` returns to a step is the value of a chunk; `of_whole_batch` tells that of the batch.

    Args:
        replicas: The replicas, just built.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._home = replicas[0].device
        # What a metric holds is called by it, and by steps only if a module holds it as well.
        modules = [module for module in replicas.master.modules() if not isinstance(module, Metric)]
        metrics = {id(child): child for module in modules for child in module.children() if isinstance(child, Metric)}
        depths: list[list[int]] = [[0] for _ in replicas]
        # A metric that another one holds as well has a state to which calls of that other one add.
        held = {id(part) for metric in metrics.values() for part in metric.modules() if part is not metric}
        self._entries = [
            _Entry(
                metric,
                [replica.references.find(metric) for replica in replicas],  # type: ignore[misc]
                depths,
                id(metric) in held,
            )
            for metric in metrics.values()
        ]
        self._collections = [m for m in replicas.master.modules() if isinstance(m, MetricCollection)]
        self._originals = {id(copied): entry.metric for entry in self._entries for copied in entry.copies}
        self._returned: list[tuple[Tensor, Tensor]] = []
        _warn_of_unregistered(replicas.master)

    def original(self, metric: Metric) -> Metric:
        """Return the master's metric for a replica's."""
        return self._originals.get(id(metric), metric)

    def of_whole_batch(self, value: Any) -> Tensor | None:
        """Return what a metric's `forward` would have returned for the whole batch.

        Args:
            value: What it has returned on a replica in the last step, or an element of that, such as one class's.

        Returns:
            The value, or None if this is not what a metric has returned.
        """
        for ours, whole in self._returned if isinstance(value, Tensor) else ():
            if ours.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
                return whole.as_strided(value.shape, value.stride(), value.storage_offset())
        return None

    def fold(self, active: Sequence[int], weights: Sequence[float], sizes: Sequence[int]) -> None:
        """Fold what the step added.

        Args:
            active: Indices of the replicas that ran the step, in order.
            weights: What each of their chunks counts.
            sizes: Samples in each of them.
        """
        touched = False
        self._returned.clear()
        for entry in self._entries:
            chunks = zip(active, weights, sizes, strict=True)
            called = [(index, weight, size) for index, weight, size in chunks if entry.calls[index]]
            if not called:
                continue
            touched = True
            calls = [call for index, _, _ in called for call in entry.calls[index]]
            # After several calls of `forward`, the value of the last one is not that of the merged state.
            was_reset = any(call.method == "reset" for call in calls)
            one_value = len(calls) == len(called) or all(call.method == "update" for call in calls)
            indices, weights_of_calls, sizes_of_calls = zip(*called, strict=True)
            is_merged = has_mergeable_state(entry.metric) and not entry.is_held
            if is_merged and one_value and not was_reset and _states_tell(entry.metric, calls):
                self._merge(entry, indices)
            else:
                self._replay(entry, indices, weights_of_calls, sizes_of_calls)
            for index in indices:
                entry.empty(index)
        if touched:
            for collection in self._collections:
                updated_only = all(last_forward_value(metric) is None for metric in collection.values(copy_state=False))
                restore_compute_groups(collection, form=updated_only)

    def _merge(self, entry: _Entry, indices: Sequence[int]) -> None:
        metric, copies = entry.metric, [entry.copies[index] for index in indices]
        batch = merge_states(metric, [to_device(read_state(copied), self._home) for copied in copies])
        if any(last_forward_value(copied) is not None for copied in copies):
            value = compute_over(metric, batch)
            set_forward_value(metric, value)
            self._pair([entry.calls[index][0] for index in indices], value)
        calls = max(len(entry.calls[index]) for index in indices)
        write_state(metric, merge_states(metric, [read_state(metric), batch]), updates=calls)

    def _replay(self, entry: _Entry, indices: Sequence[int], weights: Sequence[float], sizes: Sequence[int]) -> None:
        by_replica = [entry.calls[index] for index in indices]
        same_calls = len({tuple(call.method for call in calls) for calls in by_replica}) == 1
        groups = list(zip(*by_replica, strict=False))
        are_joined = same_calls and all(_can_join_calls(group, sizes) for group in groups)
        if not are_joined or _is_extreme(entry.metric, by_replica[0]):
            for calls in by_replica:
                for call in calls:
                    getattr(entry.metric, call.method)(
                        *to_device(call.args, self._home), **to_device(call.kwargs, self._home)
                    )
            return
        for group in groups:
            args = join([call.args for call in group], weights, sizes, self._home)
            kwargs = join([call.kwargs for call in group], weights, sizes, self._home)
            self._pair(group, getattr(entry.metric, group[0].method)(*args, **kwargs))

    def _pair(self, calls: Sequence[_Call], whole: Any) -> None:
        """Remember what replicas' calls have returned beside what the same call returns for the whole batch."""
        wholes = list(_tensors(_with_own_memory(whole)))
        for call in calls:
            parts = list(_tensors(call.returned))
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
    return map_items(value, _with_own_memory)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for _, item in items(value):
        yield from _tensors(item)


def _states_tell(metric: Metric, calls: Sequence[_Call]) -> bool:
    """Tell whether the states of chunks make that of the batch, rather than the mean of what was passed."""
    scalars = [value for call in calls for value in call.scalars]
    return not scalars or isinstance(metric, SumMetric) or any(map(is_whole, scalars))


def _is_extreme(metric: Metric, calls: Sequence[_Call]) -> bool:
    """Tell whether a metric is given the largest or smallest value of a chunk."""
    return isinstance(metric, MaxMetric | MinMetric) and any(call.scalars for call in calls)


def _can_join_calls(calls: Sequence[_Call], sizes: Sequence[int]) -> bool:
    """Tell whether the arguments of replicas' calls make those of one call for the whole batch."""
    options = [{key: value for key, value in call.kwargs.items() if not isinstance(value, str)} for call in calls]
    texts = [{key: value for key, value in call.kwargs.items() if isinstance(value, str)} for call in calls]
    return all(text == texts[0] for text in texts) and can_join(
        [(call.args, option) for call, option in zip(calls, options, strict=True)], sizes
    )

"""Private names of torchmetrics. Checked on torchmetrics 1.9.0."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

MetricOrCollection = TypeVar("MetricOrCollection", bound=Metric | MetricCollection)
State = dict[str, Tensor | list[Tensor]]

Gather = Callable[..., list[Tensor]]

_SYNC = Metric._sync_dist  # the public `sync` caches the state before it, and takes one function per tensor


def forget_computed(metric: Metric) -> None:
    """Discard the cached value, which may come from other ranks."""
    metric._computed = None


def list_states(metric: Metric) -> dict[str, list[Any]]:
    """Return the entries of list states by name; entries to be concatenated are returned as one tensor."""
    found = {}
    for name, default in metric._defaults.items():
        if isinstance(default, list):
            value = getattr(metric, name)
            entries = value if isinstance(value, list) else [value]
            is_concatenated = metric._reductions[name] is dim_zero_cat and bool(entries)
            found[name] = [dim_zero_cat(entries)] if is_concatenated else entries
    return found


def tensor_states(metric: Metric) -> dict[str, Tensor]:
    """Return the tensor states by name."""
    return {name: getattr(metric, name) for name, default in metric._defaults.items() if isinstance(default, Tensor)}


def watch_synchronization(
    cleanup: ExitStack,
    around: Callable[[Metric, Callable[[Gather], None], Gather, dist.ProcessGroup | None], None],
) -> None:
    """Replace every metric's synchronisation by `around(metric, synchronize, gather, group)` until `cleanup` closes."""

    def _sync_dist(
        self: Metric, dist_sync_fn: Gather | None = None, process_group: dist.ProcessGroup | None = None
    ) -> None:
        group = process_group or self.process_group
        around(self, partial(_SYNC, self, process_group=group), dist_sync_fn or gather_all_tensors, group)

    Metric._sync_dist = _sync_dist  # type: ignore[method-assign]
    cleanup.callback(setattr, Metric, "_sync_dist", _SYNC)


def read_state(metric: Metric) -> State:
    """Return a metric's states, not copied."""
    return {name: getattr(metric, name) for name in metric._defaults}


def reductions(metric: Metric) -> dict[str, Any]:
    """Return the function that reduces each state over ranks, by name of the state; None if it has none."""
    return metric._reductions


def write_state(metric: Metric, state: State, updates: int) -> None:
    """Replace a metric's state and add to its update count."""
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count += updates
    metric._computed = None


def compute_over(metric: Metric, state: State) -> Any:
    """Compute a metric over another state, as `forward` does for its batch."""
    kept, count, synced = read_state(metric), metric._update_count, metric._to_sync
    metric._to_sync = False
    write_state(metric, state, updates=1)
    value = metric.compute()
    write_state(metric, kept, updates=0)
    metric._update_count, metric._to_sync = count, synced
    return value


def last_forward_value(metric: Metric) -> Any:
    """Return the result of the metric's last `forward`, or None after updates alone."""
    return metric._forward_cache


def set_forward_value(metric: Metric, value: Any) -> None:
    """Set the value that `self.log(name, metric, on_step=True)` logs."""
    metric._forward_cache = value


def move_keeping_dtype(metric: MetricOrCollection, device: torch.device) -> MetricOrCollection:
    """Move a metric to a device; `to` alone would also change its dtype to the default dtype."""
    metrics = [part for part in metric.modules() if isinstance(part, Metric)]
    dtypes = [part._dtype for part in metrics]
    metric.to(device)
    for part, dtype in zip(metrics, dtypes, strict=True):
        part._dtype = dtype
    return metric


def take_dtype(metric: Metric, source: Metric) -> None:
    """Copy the dtype of another metric; Lightning may change it when it moves logged metrics."""
    for part, other in zip(metric.modules(), source.modules(), strict=True):
        if isinstance(part, Metric) and isinstance(other, Metric):
            part._dtype = other._dtype


def forget_compute_groups(collection: MetricCollection) -> None:
    """Keep a replica's collection from grouping metrics whose states agree on a small chunk by chance."""
    collection._enable_compute_groups = False
    collection._groups_checked = False


def restore_compute_groups(collection: MetricCollection, form: bool) -> None:
    """Have the metrics of each group share one state again; `form` allows new groups after a first update."""
    if not collection._enable_compute_groups:
        return
    if form and not collection._groups_checked:
        collection._merge_compute_groups()
        collection._groups_checked = True
    collection._state_is_copy = False
    if collection._groups_checked:
        collection._compute_groups_create_state_ref()


Recorder = Callable[[str, tuple[Any, ...], dict[str, Any]], Callable[[Any], Any]]


def record_calls(metric: Metric, recorder: Recorder, depth: list[int]) -> None:
    """Report outermost calls of `update`, `forward` and `reset`; `recorder` returns a function of the result.

    `depth` holds one number, the depth of calls in metrics of the same replica, because metrics call each other.
    """

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if depth[0]:
                return function(*args, **kwargs)
            pass_on = recorder(name, args, kwargs)
            depth[0] += 1
            try:
                result = function(*args, **kwargs)
            finally:
                depth[0] -= 1
            return pass_on(result)

        return call

    for name in ("update", "forward", "reset"):
        metric.__dict__[name] = wrap(name, getattr(metric, name))

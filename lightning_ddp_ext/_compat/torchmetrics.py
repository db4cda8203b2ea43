"""Private names of torchmetrics, each with its reason. Checked on torchmetrics 1.9.0; `tests/compat` guards them.

`Metric.merge_state` is public, but refuses `full_state_update`, puts the incoming entries of lists first, leaves the
update count alone and divides by it for means: states have to be read and written one by one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.utilities.distributed import gather_all_tensors

MetricOrCollection = TypeVar("MetricOrCollection", bound=Metric | MetricCollection)
State = dict[str, Tensor | list[Tensor]]

Gather = Callable[..., list[Tensor]]

_SYNC = Metric._sync_dist  # `sync` keeps what there was before it, and takes no function for more than one tensor
_MERGEABLE = (dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min)


def forget_computed(metric: Metric) -> None:
    """Compute the metric again when its value is asked for next; it may have been that of other ranks."""
    metric._computed = None


def list_states(metric: Metric) -> dict[str, list[Any]]:
    """Return the entries of states that begin as empty lists, by name; those that are to be concatenated as one."""
    found = {}
    for name, default in metric._defaults.items():
        if isinstance(default, list):
            value = getattr(metric, name)
            entries = value if isinstance(value, list) else [value]
            is_concatenated = metric._reductions[name] is dim_zero_cat and bool(entries)
            found[name] = [dim_zero_cat(entries)] if is_concatenated else entries
    return found


def tensor_states(metric: Metric) -> dict[str, Tensor]:
    """Return the states that begin as tensors, by name."""
    return {name: getattr(metric, name) for name, default in metric._defaults.items() if isinstance(default, Tensor)}


def watch_synchronization(
    around: Callable[[Metric, Callable[[Gather], None], Gather, dist.ProcessGroup | None], None],
) -> None:
    """Have every metric's synchronisation run by a function.

    Args:
        around: Called with the metric, a function that synchronises it, what that gathers tensors with, and the ranks.
    """

    def _sync_dist(
        self: Metric, dist_sync_fn: Gather | None = None, process_group: dist.ProcessGroup | None = None
    ) -> None:
        group = process_group or self.process_group
        around(self, partial(_SYNC, self, process_group=group), dist_sync_fn or gather_all_tensors, group)

    Metric._sync_dist = _sync_dist  # type: ignore[method-assign]


def unwatch_synchronization() -> None:
    """Undo `watch_synchronization`."""
    Metric._sync_dist = _SYNC  # type: ignore[method-assign]


def has_mergeable_state(metric: Metric) -> bool:
    """Tell whether the state over a batch follows from the states over its chunks."""
    wraps_metrics = any(isinstance(child, Metric | MetricCollection) for child in metric.children())
    reductions = metric._reductions.values()
    return (
        bool(metric._defaults)
        and metric.full_state_update is not True
        and not wraps_metrics
        and all(reduction in _MERGEABLE for reduction in reductions)
    )


def read_state(metric: Metric) -> State:
    """Return a metric's state tensors, shared with it."""
    return {name: getattr(metric, name) for name in metric._defaults}


def merge_states(metric: Metric, states: Sequence[State]) -> State:
    """Merge states in the order given, by each state's own reduction."""
    return {name: _merge_one(metric._reductions[name], [state[name] for state in states]) for name in metric._defaults}


def _merge_one(reduction: Any, values: list[Any]) -> Tensor | list[Tensor]:
    if any(isinstance(value, list) for value in values):
        return [item for value in values for item in (value if isinstance(value, list) else [value])]
    if reduction is dim_zero_cat:
        return torch.cat(values)
    # States such as those of `R2Score` begin as one number and have one for each output after the first update.
    shape = max((value.shape for value in values), key=len)
    stacked = torch.stack([value.expand(shape) if value.ndim == 0 else value for value in values])
    if reduction is dim_zero_sum:
        return stacked.sum(0)
    return stacked.amax(0) if reduction is dim_zero_max else stacked.amin(0)


def write_state(metric: Metric, state: State, updates: int) -> None:
    """Replace a metric's state and add to the number of its updates."""
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count += updates
    metric._computed = None


def compute_over(metric: Metric, state: State) -> Any:
    """Compute a metric over a state that is not its own, as `forward` does for the batch it was given."""
    kept, count, synced = read_state(metric), metric._update_count, metric._to_sync
    metric._to_sync = False
    write_state(metric, state, updates=1)
    value = metric.compute()
    write_state(metric, kept, updates=0)
    metric._update_count, metric._to_sync = count, synced
    return value


def last_forward_value(metric: Metric) -> Any:
    """Return what the metric's last `forward` returned, None if it was only updated since the last reset."""
    return metric._forward_cache


def set_forward_value(metric: Metric, value: Any) -> None:
    """Set the value that `self.log(name, metric, on_step=True)` logs."""
    metric._forward_cache = value


def move_keeping_dtype(metric: MetricOrCollection, device: torch.device) -> MetricOrCollection:
    """Move a metric to a device; `to` would also make it take on the current default dtype."""
    metrics = [part for part in metric.modules() if isinstance(part, Metric)]
    dtypes = [part._dtype for part in metrics]
    metric.to(device)
    for part, dtype in zip(metrics, dtypes, strict=True):
        part._dtype = dtype
    return metric


def take_dtype(metric: Metric, source: Metric) -> None:
    """Round what is given to a metric as another does; Lightning moves those that are logged, which may change it."""
    for part, other in zip(metric.modules(), source.modules(), strict=True):
        if isinstance(part, Metric) and isinstance(other, Metric):
            part._dtype = other._dtype


def forget_compute_groups(collection: MetricCollection) -> None:
    """Keep a replica's collection from grouping metrics whose states happen to agree on a small chunk."""
    collection._enable_compute_groups = False
    collection._groups_checked = False


def restore_compute_groups(collection: MetricCollection, form: bool) -> None:
    """Make the members of each group share one state again after their states were replaced.

    Args:
        collection: The master's collection.
        form: Whether groups may be formed now, from the states after a first update.
    """
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
    """Report the outermost calls of `update`, `forward` and `reset` of a metric, and pass on what each returns.

    Args:
        metric: The metric; metrics call each other.
        recorder: Told of a call; returns what is given its result.
        depth: One number, of calls under way in metrics of the same replica.
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

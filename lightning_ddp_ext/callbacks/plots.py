"""Pictures of `BalanceReport` and `JoinReport`, drawn with matplotlib."""

import importlib.util
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ddp_ext.callbacks.balance_report import ReplicaRecord
    from lightning_ddp_ext.callbacks.join_report import RankRecord

_SMOOTHED_OVER = 9  # batches
_BAR_HEIGHT = 0.7
_BUSY, _SHADOW = "tab:blue", "lightgrey"


def can_draw() -> bool:
    """Return True if matplotlib is installed, and warn otherwise."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    warnings.warn("no plot: matplotlib is not installed. Install `lightning-ddp-ext[demo]`.", stacklevel=2)
    return False


def draw_balance(path: Path, records: "Sequence[ReplicaRecord]") -> None:
    """Draw the samples and the time of each replica over the training batches."""
    if not can_draw():
        return
    figure = _figure(height=3.4)
    chunks, times = figure.subplots(1, 2)
    draw_chunks(chunks, records)
    draw_times(times, records)
    _save(figure, path)


def draw_chunks(axis: Any, records: "Sequence[ReplicaRecord]") -> None:
    """Draw the samples of each replica, stacked, on matplotlib axes."""
    by_replica = _by_replica(records)
    batches = [record.batch for record in next(iter(by_replica.values()))]
    chunks = [[record.chunk for record in own] for own in by_replica.values()]
    axis.stackplot(batches, chunks, labels=[*by_replica], step="mid", alpha=0.8)
    axis.set(title="replicas: samples per batch, stacked", xlabel="batch")
    _finish(axis)
    axis.legend(fontsize="small", loc="lower left", framealpha=0.9)


def draw_times(axis: Any, records: "Sequence[ReplicaRecord]") -> None:
    """Draw the time of each replica, as a running median, on matplotlib axes."""
    for label, own in _by_replica(records).items():
        axis.plot([r.batch for r in own], _running_median([1000 * r.seconds for r in own]), label=label)
    axis.set(title=f"replicas: ms per batch, median of {_SMOOTHED_OVER}", xlabel="batch")
    axis.set_ylim(bottom=0)
    _finish(axis)
    axis.legend(fontsize="small", frameon=False)


def draw_ranks(path: Path, records: "Sequence[RankRecord]") -> None:
    """Draw a line for each rank: its steps with data and its shadow steps, one epoch after another."""
    if not can_draw():
        return
    from matplotlib.patches import Patch

    ranks = max(record.rank for record in records) + 1
    figure = _figure(height=1.4 + 0.45 * ranks)
    axis = figure.subplots()
    start = 0.0
    for epoch in sorted({record.epoch for record in records}):
        of_epoch = [record for record in records if record.epoch == epoch]
        for record in of_epoch:
            busy, row = record.seconds - record.shadow_seconds, (record.rank - _BAR_HEIGHT / 2, _BAR_HEIGHT)
            axis.broken_barh([(start, busy)], row, color=_BUSY)
            axis.broken_barh([(start + busy, record.shadow_seconds)], row, color=_SHADOW)
        axis.axvline(start, color="black", linewidth=0.8)
        axis.annotate(f"epoch {epoch}", (start, -0.5), xytext=(3, 3), textcoords="offset points", fontsize="small")
        start += max(record.seconds for record in of_epoch)
    axis.set(xlabel="seconds in training steps", yticks=range(ranks), yticklabels=[f"rank {i}" for i in range(ranks)])
    axis.set(xlim=(0, start or 1), ylim=(ranks - 0.5, -1))  # rank 0 at the top
    handles = [Patch(color=_BUSY, label="with data"), Patch(color=_SHADOW, label="shadow steps")]
    axis.legend(handles=handles, fontsize="small", frameon=False, loc="upper right", ncols=2, bbox_to_anchor=(1, 1.15))
    axis.spines[["top", "right", "left"]].set_visible(False)
    _save(figure, path)


def _figure(height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(11, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _by_replica(records: "Sequence[ReplicaRecord]") -> "dict[str, list[ReplicaRecord]]":
    by_replica = defaultdict(list)
    for record in records:
        by_replica[f"replica {record.replica} ({record.device})"].append(record)
    return dict(by_replica)


def _running_median(values: Sequence[float]) -> list[float]:
    half = _SMOOTHED_OVER // 2
    windows = [sorted(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
    return [window[len(window) // 2] for window in windows]


def _finish(axis: Any) -> None:
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)

"""The curves of a run as a picture."""

import csv
import importlib.util
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_ddp_ext.callbacks.balance_report import ReplicaRecord

_NOT_CURVES = {"step", "epoch"}
_SMOOTHED_OVER = 9


def draw_run(folder: Path, records: Sequence[ReplicaRecord]) -> Path | None:
    """Draw loss and metrics over the steps, and each replica's chunk and time, into `run.png`.

    Args:
        folder: A run folder with `metrics.csv`; without it there are no curves.
        records: What the replicas did; empty for other strategies than `balanced_dp`.

    Returns:
        The path of the picture, or None if there is nothing to draw or matplotlib is not installed (a warning says so).
    """
    curves = _read_curves(folder / "metrics.csv")
    if not curves and not records:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        warnings.warn("no picture: matplotlib is not installed. Install `lightning-ddp-ext[demo]`.", stacklevel=2)
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4 * (2 if records else 1)), layout="constrained")
    axes = figure.subplots(2 if records else 1, 2, squeeze=False)
    _draw_curves(axes[0][0], {name: curve for name, curve in curves.items() if "loss" in name}, "loss")
    _draw_curves(axes[0][1], {name: curve for name, curve in curves.items() if "loss" not in name}, "metrics")
    if records:
        _draw_chunks(axes[1][0], records)
        _draw_times(axes[1][1], records)
    path = folder / "run.png"
    figure.savefig(path, dpi=120)
    return path


def _read_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    if not path.is_file():
        return curves
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in _NOT_CURVES:
                    curves[name].append((int(row["step"]), float(value)))
    return curves


def _draw_curves(axis: Any, curves: dict[str, list[tuple[int, float]]], title: str) -> None:
    for name, points in sorted(curves.items()):
        steps, values = zip(*points, strict=True)
        alone = len(points) == 1
        axis.plot(steps, values, label=name, marker="o" if alone or "step" not in name else None, markersize=3)
    axis.set(title=title, xlabel="optimizer step")
    _finish(axis, bool(curves))


def _draw_chunks(axis: Any, records: Sequence[ReplicaRecord]) -> None:
    by_replica = _by_replica(records)
    chunks = [[record.chunk for record in own] for own in by_replica.values()]
    batches = [record.batch for record in by_replica[0]]
    axis.stackplot(batches, chunks, labels=_labels(by_replica), step="mid", alpha=0.8)
    axis.set(title="replicas: samples per batch, stacked", xlabel="batch")
    _finish(axis, legend=False)
    axis.legend(fontsize="small", loc="lower left", framealpha=0.9)


def _draw_times(axis: Any, records: Sequence[ReplicaRecord]) -> None:
    by_replica = _by_replica(records)
    for label, own in zip(_labels(by_replica), by_replica.values(), strict=True):
        axis.plot([r.batch for r in own], _running_median([1000 * r.seconds for r in own]), label=label)
    axis.set(title=f"replicas: ms per batch, median of {_SMOOTHED_OVER}", xlabel="batch")
    axis.set_ylim(bottom=0)
    _finish(axis, legend=True)


def _by_replica(records: Sequence[ReplicaRecord]) -> dict[int, list[ReplicaRecord]]:
    by_replica: dict[int, list[ReplicaRecord]] = defaultdict(list)
    for record in records:
        by_replica[record.replica].append(record)
    return dict(by_replica)


def _labels(by_replica: dict[int, list[ReplicaRecord]]) -> list[str]:
    return [f"replica {replica} ({own[0].device})" for replica, own in by_replica.items()]


def _running_median(values: Sequence[float]) -> list[float]:
    half = _SMOOTHED_OVER // 2
    windows = [sorted(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
    return [window[len(window) // 2] for window in windows]


def _finish(axis: Any, legend: bool) -> None:
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    if legend:
        axis.legend(fontsize="small", frameon=False)

"""The curves of a run as a picture."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_ddp_ext.callbacks.balance_report import ReplicaRecord
from lightning_ddp_ext.callbacks.plots import can_draw, draw_chunks, draw_times

_NOT_CURVES = {"step", "epoch"}


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
    if not can_draw():
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4 * (2 if records else 1)), layout="constrained")
    axes = figure.subplots(2 if records else 1, 2, squeeze=False)
    _draw_curves(axes[0][0], {name: curve for name, curve in curves.items() if "loss" in name}, "loss")
    _draw_curves(axes[0][1], {name: curve for name, curve in curves.items() if "loss" not in name}, "metrics")
    if records:
        draw_chunks(axes[1][0], records)
        draw_times(axes[1][1], records)
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
                if value and name not in _NOT_CURVES and not name.startswith("replica_"):
                    curves[name].append((int(row["step"]), float(value)))
    return curves


def _draw_curves(axis: Any, curves: dict[str, list[tuple[int, float]]], title: str) -> None:
    for name, points in sorted(curves.items()):
        steps, values = zip(*points, strict=True)
        alone = len(points) == 1
        axis.plot(steps, values, label=name, marker="o" if alone or "step" not in name else None, markersize=3)
    axis.set(title=title, xlabel="optimizer step")
    _finish(axis, bool(curves))


def _finish(axis: Any, legend: bool) -> None:
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    if legend:
        axis.legend(fontsize="small", frameon=False)

"""The ratios as a picture."""

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring.estimates import Estimate
from measuring.results import DDP, StepResult

_COLOURS = ("tab:blue", "tab:orange")
_TICKS = (0.125, 0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


def draw_ratios(results: Mapping[str, StepResult], floors: Mapping[str, float], folder: Path) -> list[Path]:
    """Draw `balanced_dp`'s ratio to the best one device and to `ddp` into `ratios.png` and `ratios.svg`.

    Args:
        results: The training steps by model.
        floors: Ratios to the best one device that cannot be beaten, of the models for which they are known.
        folder: Where the pictures go.

    Returns:
        Their paths; none if matplotlib is not installed (a warning says so).
    """
    if importlib.util.find_spec("matplotlib") is None:
        warnings.warn("no picture: matplotlib is not installed. Install `lightning-ddp-ext[demo]`.", stacklevel=2)
        return []
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.95 * len(results)), layout="constrained")
    axis = figure.subplots()
    models = list(results)
    _draw_series(axis, [result.ratio_to_device for result in results.values()], -0.16, "to the best one device")
    _draw_series(axis, [result.ratio_to_ddp for result in results.values()], 0.16, f"to {DDP} with two processes")
    _draw_floors(axis, {models.index(model): floor for model, floor in floors.items()})
    _finish(axis, models)
    if any(result.measurement.any_load for result in results.values()):
        axis.set_title("all rounds count, however busy the machine was", color="tab:red", fontsize="medium")
    figure.suptitle("Time of a training step: balanced_dp with 2 replicas relative to others")
    paths = [folder / f"ratios.{suffix}" for suffix in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def _draw_series(axis: Any, ratios: Sequence[Estimate | None], offset: float, label: str) -> None:
    colour = _COLOURS[offset > 0]
    known = [(row + offset, ratio) for row, ratio in enumerate(ratios) if ratio is not None]
    medians = [ratio.median for _, ratio in known]
    spans = [
        [ratio.median - ratio.low for _, ratio in known],
        [ratio.high - ratio.median for _, ratio in known],
    ]
    rows = [row for row, _ in known]
    axis.errorbar(medians, rows, xerr=spans, fmt="o", color=colour, capsize=4, label=label)
    # The numbers stand in a column of their own, where no interval can cross them.
    for row, ratio in enumerate(ratios):
        text = "too noisy" if ratio is None else f"{ratio.median:.2f}  [{ratio.low:.2f}, {ratio.high:.2f}]"
        place = (1.02, row + offset)
        axis.annotate(text, place, xycoords=axis.get_yaxis_transform(), va="center", color=colour, fontsize="small")


def _draw_floors(axis: Any, floors: Mapping[int, float]) -> None:
    if floors:
        axis.scatter(
            list(floors.values()),
            [row - 0.16 for row in floors],
            marker="|",
            s=200,
            color="black",
            zorder=3,
            label="least that Python's lock allows, to the best one device",
        )


def _finish(axis: Any, models: Sequence[str]) -> None:
    axis.axvline(1.0, color="black", linewidth=1)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    low, high = min(low, 0.8), max(high, 1.25)  # so that the line at 1.00 has both sides
    axis.set_xticks([], minor=True)
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlim(low, high)
    axis.set_yticks(range(len(models)), models)
    axis.set_ylim(len(models) - 0.5, -0.5)
    axis.set_xlabel("← balanced_dp is faster      ratio of times, median with 95 % interval      it is slower →")
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    handles, _ = axis.get_legend_handles_labels()
    axis.figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize="small")

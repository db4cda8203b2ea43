"""The ratios as a picture."""

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring.estimates import Estimate, format_ratio

_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:red", "tab:brown")
_TICKS = (0.125, 0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_MORE_TICKS = (0.8, 0.9, 0.95, 1.05, 1.1, 1.3)  # where they have room
_APART = 0.28  # between the series of a row, at most
_SHARE = 0.8  # of a row, for its series


def draw_ratios(
    title: str,
    models: Sequence[str],
    series: Mapping[str, Sequence[Estimate | None]],
    folder: Path,
    any_load: bool = False,
) -> None:
    """Draw ratios of times into `ratios.png` and `ratios.svg`, unless matplotlib is missing; a row for each model.

    The title begins with the name of ours; a ratio is None if too few rounds count.
    """
    if importlib.util.find_spec("matplotlib") is None:
        warnings.warn("no picture: matplotlib is not installed. Install `lightning-ddp-ext[demo]`.", stacklevel=2)
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.7 + (0.3 + 0.3 * len(series)) * len(models)), layout="constrained")
    axis = figure.subplots()
    apart = min(_APART, _SHARE / len(series))
    offsets = [apart * (index - (len(series) - 1) / 2) for index in range(len(series))]
    for (label, ratios), offset, colour in zip(series.items(), offsets, _COLOURS, strict=False):
        _draw_series(axis, ratios, offset, label, colour)
    _finish(axis, models, title.split()[0])
    if any_load:
        axis.set_title("all rounds count, however busy the machine was", color="tab:red", fontsize="medium")
    figure.suptitle(f"Time of a training step: {title}")
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"ratios.{suffix}", dpi=150)


def _draw_series(axis: Any, ratios: Sequence[Estimate | None], offset: float, label: str, colour: str) -> None:
    known = [(row + offset, ratio) for row, ratio in enumerate(ratios) if ratio is not None]
    medians = [ratio.median for _, ratio in known]
    spans = [[ratio.median - ratio.low for _, ratio in known], [ratio.high - ratio.median for _, ratio in known]]
    rows = [row for row, _ in known]
    axis.errorbar(medians, rows, xerr=spans, fmt="o", color=colour, capsize=4, label=label)
    # The numbers stand in a column of their own, where no interval can cross them.
    for row, ratio in enumerate(ratios):
        place = (1.02, row + offset)
        axis.annotate(
            format_ratio(ratio), place, xycoords=axis.get_yaxis_transform(), va="center", color=colour, fontsize="small"
        )


def _finish(axis: Any, models: Sequence[str], ours: str) -> None:
    axis.axvline(1.0, color="black", linewidth=1)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    low, high = min(low, 0.8), max(high, 1.25)  # so that the line at 1.00 has both sides
    axis.set_xticks([], minor=True)
    candidates = _TICKS if high > 1.7 * low else sorted({*_TICKS, *_MORE_TICKS} - {0.85})
    ticks = [tick for tick in candidates if low <= tick <= high]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlim(low, high)
    axis.set_yticks(range(len(models)), models)
    axis.set_ylim(len(models) - 0.5, -0.5)
    axis.set_xlabel(f"← {ours} is faster      ratio of times, median with 95 % interval      it is slower →")
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    handles, _ = axis.get_legend_handles_labels()
    axis.figure.legend(
        handles=handles, loc="outside lower center", ncols=min(2, len(handles)), frameon=False, fontsize="small"
    )

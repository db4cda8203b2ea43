"""When ranks had data and when they had none, drawn with matplotlib."""

import importlib.util
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

_SMOOTHED_OVER = 9


class _Record(Protocol):
    """What is drawn of a `ReplicaRecord`."""

    @property
    def batch(self) -> int: ...
    @property
    def replica(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def chunk(self) -> int: ...
    @property
    def seconds(self) -> float: ...


def can_draw() -> bool:
    """Tell whether matplotlib is installed; a warning says what to install if not."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    warnings.warn("no picture: matplotlib is not installed. Install `lightning-ddp-ext[demo]`.", stacklevel=2)
    return False


def draw_balance(path: Path, records: Sequence[_Record]) -> None:
    """Draw the samples and the time of each replica over the training batches.

    Args:
        path: The picture to write; its suffix says the format.
        records: What the replicas did.
    """
    if not can_draw():
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    chunks, times = figure.subplots(1, 2)
    draw_chunks(chunks, records)
    draw_times(times, records)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def draw_chunks(axis: Any, records: Sequence[_Record]) -> None:
    """Draw the samples of each replica, stacked, on matplotlib axes."""
    by_replica = _by_replica(records)
    chunks = [[record.chunk for record in own] for own in by_replica.values()]
    batches = [record.batch for record in by_replica[0]]
    axis.stackplot(batches, chunks, labels=_labels(by_replica), step="mid", alpha=0.8)
    axis.set(title="replicas: samples per batch, stacked", xlabel="batch")
    _finish(axis)
    axis.legend(fontsize="small", loc="lower left", framealpha=0.9)


def draw_times(axis: Any, records: Sequence[_Record]) -> None:
    """Draw the time of each replica, as a running median, on matplotlib axes."""
    by_replica = _by_replica(records)
    for label, own in zip(_labels(by_replica), by_replica.values(), strict=True):
        axis.plot([r.batch for r in own], _running_median([1000 * r.seconds for r in own]), label=label)
    axis.set(title=f"replicas: ms per batch, median of {_SMOOTHED_OVER}", xlabel="batch")
    axis.set_ylim(bottom=0)
    _finish(axis)
    axis.legend(fontsize="small", frameon=False)


def _by_replica(records: Sequence[_Record]) -> dict[int, list[_Record]]:
    by_replica: dict[int, list[_Record]] = defaultdict(list)
    for record in records:
        by_replica[record.replica].append(record)
    return dict(by_replica)


def _labels(by_replica: dict[int, list[_Record]]) -> list[str]:
    return [f"replica {replica} ({own[0].device})" for replica, own in by_replica.items()]


def _running_median(values: Sequence[float]) -> list[float]:
    half = _SMOOTHED_OVER // 2
    windows = [sorted(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
    return [window[len(window) // 2] for window in windows]


def _finish(axis: Any) -> None:
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


_HEIGHT = 0.7
_WITH_DATA, _GHOST = "tab:blue", "lightgrey"


class _JoinRecord(Protocol):
    """What is drawn of a `RankRecord`."""

    @property
    def epoch(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def shadow_seconds(self) -> float: ...
    @property
    def seconds(self) -> float: ...


def draw_ranks(path: Path, records: Sequence[_JoinRecord]) -> None:
    """Draw a line for each rank: its steps with data, and those without, of one epoch after another.

    Args:
        path: The picture to write; its suffix says the format.
        records: What the ranks did.
    """
    if not can_draw():
        return
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = max(record.rank for record in records) + 1
    figure = Figure(figsize=(11, 1.4 + 0.45 * ranks), layout="constrained")
    axis = figure.subplots()
    begin = 0.0
    for epoch in sorted({record.epoch for record in records}):
        own = [record for record in records if record.epoch == epoch]
        for record in own:
            busy = record.seconds - record.shadow_seconds
            below = record.rank - _HEIGHT / 2
            axis.broken_barh([(begin, busy)], (below, _HEIGHT), color=_WITH_DATA)
            axis.broken_barh([(begin + busy, record.shadow_seconds)], (below, _HEIGHT), color=_GHOST)
        axis.axvline(begin, color="black", linewidth=0.8)
        axis.annotate(f"epoch {epoch}", (begin, -0.5), xytext=(3, 3), textcoords="offset points", fontsize="small")
        begin += max(record.seconds for record in own)
    axis.set(xlabel="seconds in training steps", yticks=range(ranks), yticklabels=[f"rank {i}" for i in range(ranks)])
    axis.set(xlim=(0, begin or 1), ylim=(ranks - 0.5, -1))  # rank 0 above
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)
    handles = [Patch(color=_WITH_DATA, label="with data"), Patch(color=_GHOST, label="shadow steps")]
    axis.legend(handles=handles, fontsize="small", frameon=False, loc="upper right", ncols=2, bbox_to_anchor=(1, 1.15))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)

"""When ranks had data and when they had none, drawn with matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lightning_ddp_ext.callbacks.balance_picture import can_draw

_HEIGHT = 0.7
_WITH_DATA, _GHOST = "tab:blue", "lightgrey"


class _Record(Protocol):
    """What is drawn of a `RankRecord`."""

    @property
    def epoch(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def ghost_seconds(self) -> float: ...
    @property
    def seconds(self) -> float: ...


def draw_ranks(path: Path, records: Sequence[_Record]) -> None:
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
            busy = record.seconds - record.ghost_seconds
            below = record.rank - _HEIGHT / 2
            axis.broken_barh([(begin, busy)], (below, _HEIGHT), color=_WITH_DATA)
            axis.broken_barh([(begin + busy, record.ghost_seconds)], (below, _HEIGHT), color=_GHOST)
        axis.axvline(begin, color="black", linewidth=0.8)
        axis.annotate(f"epoch {epoch}", (begin, -0.5), xytext=(3, 3), textcoords="offset points", fontsize="small")
        begin += max(record.seconds for record in own)
    axis.set(xlabel="seconds in training steps", yticks=range(ranks), yticklabels=[f"rank {i}" for i in range(ranks)])
    axis.set(xlim=(0, begin or 1), ylim=(ranks - 0.5, -1))  # rank 0 above
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)
    handles = [Patch(color=_WITH_DATA, label="with data"), Patch(color=_GHOST, label="ghost steps")]
    axis.legend(handles=handles, fontsize="small", frameon=False, loc="upper right", ncols=2, bbox_to_anchor=(1, 1.15))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)

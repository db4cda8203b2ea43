"""Outcomes of faults for people."""

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from tests.strategies.faults import FaultOutcome

_SAID = 110  # characters


def make_fault_table(outcomes: Sequence[FaultOutcome], limit: float) -> Table:
    """Show what became of runs.

    Args:
        outcomes: Of the faults, in order.
        limit: The stall limit in seconds.
    """
    right = sum(outcome.is_right for outcome in outcomes)
    table = Table(
        title=f"Faults with a stall limit of {limit:g} s: {right} of {len(outcomes)} as promised",
        caption="Seconds are those from the fault until the last rank has ended that can.",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for name in ("fault", "rank", "phase", "seconds", "checkpoints", "left", "what a rank said"):
        table.add_column(name, justify="right" if name in ("rank", "seconds", "left") else "left")
    for outcome in outcomes:
        table.add_row(*map(escape, _make_row(outcome)), style=None if outcome.is_right else "bold")
    return table


def show_fault(outcome: FaultOutcome) -> str:
    """Return the row of a fault as a line."""
    return " | ".join(_make_row(outcome))


def _make_row(outcome: FaultOutcome) -> list[str]:
    completed = all(row["value"] for row in outcome.rows)
    seconds = "hung" if outcome.seconds is None else f"{outcome.seconds:.1f}"
    intact = f"{outcome.checkpoints} intact" if not outcome.broken else f"broken: {', '.join(outcome.broken)}"
    return [
        outcome.fault.kind,
        str(outcome.fault.rank),
        outcome.fault.phase,
        seconds,
        intact,
        str(outcome.left),
        "(training completed)" if completed else shorten(outcome.said),
    ]


def shorten(text: str) -> str:
    """Return the first line of an error, cut where it is long."""
    line = text.partition("\n")[0].removeprefix("OtherRankError: ")
    return line if len(line) <= _SAID else f"{line[: _SAID - 3]}..."

"""What becomes of training when a rank is killed, stopped or raises, a disk is full, or a link is cut.

Two ranks train under `ddp_join`, or `ddp_checkpoint`. In a phase of training - even, uneven, or validation -
something goes wrong on one of them. Measured is how long it takes until all ranks have ended that can, and told is what
they say, whether all checkpoints that are left can be loaded, and whether processes are left. A rank that is only
slow, and a link that is cut for some seconds, must let training go on and complete.

Full disks are small file systems in memory, and links are those of hosts made of network namespaces; both need root.
The faults are those of the tests.

Run it with `python benchmarks/faults.py`; it takes about ten minutes. `--stall-timeout 60`, the default of the
strategies, takes about forty.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for `tests`, which has the faults

from measuring.command import start_parser  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.table import Table  # noqa: E402

from tests.distributed.hosts import Hosts, reason_to_skip  # noqa: E402
from tests.strategies.faults import (  # noqa: E402
    FAULTS,
    OF_LINKS,
    WHEN,
    FaultOutcome,
    become_subreaper,
    list_faults,
    run_fault,
)

_SHORT_LIMIT = 12.0  # seconds, above what a link that was cut for 4 s takes to recover
_WIDTH = 190  # columns of text, for what was said
_SAID = 110  # characters
_FIRST_PORT = 29500


def main() -> None:
    """Make faults, print the table, and exit with 1 if anything hung, broke or stayed."""
    options = parse_options()
    outcomes = run_all(options)
    Console(width=_WIDTH).print(make_fault_table(outcomes, options.stall_timeout), highlight=False)
    if options.json is not None:
        results = {"options": {**vars(options), "json": str(options.json)}, "faults": [to_json(o) for o in outcomes]}
        options.json.write_text(json.dumps(results, indent=1))
    sys.exit(0 if all(outcome.is_right for outcome in outcomes) else 1)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = start_parser(__doc__)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--phases", nargs="+", choices=list(WHEN), default=list(WHEN), help=", ".join(WHEN))
    parser.add_argument("--ranks", nargs="+", type=int, choices=(0, 1), default=[0, 1], help="where faults happen")
    parser.add_argument("--strategy", choices=("ddp_join", "ddp_checkpoint"), default="ddp_join")
    parser.add_argument("--stall-timeout", type=float, default=_SHORT_LIMIT, help="seconds")
    parser.add_argument("--workers", type=int, default=1, help="worker processes of each loader")
    parser.add_argument("--json", type=Path, help="a file for the results")
    options = parser.parse_args()
    if options.stall_timeout <= 0:
        parser.error(f"`--stall-timeout` must be above 0 s, got {options.stall_timeout}. Use 60 if unsure.")
    return options


def run_all(options: argparse.Namespace) -> list[FaultOutcome]:
    """Make one fault after another."""
    become_subreaper()
    outcomes = []
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = start_hosts(stack, temporary, options)
        for number, fault in enumerate(list_faults(options.faults, options.phases, options.ranks)):
            of_link = fault.kind in OF_LINKS
            if of_link and hosts is None:
                continue
            outcome = run_fault(
                fault, temporary / str(number), options.stall_timeout, hosts if of_link else None, _FIRST_PORT + number,
                strategy=options.strategy, workers=options.workers,
            )  # fmt: skip
            print(show_fault(outcome), file=sys.stderr, flush=True)
            outcomes.append(outcome)
    return outcomes


def start_hosts(stack: ExitStack, folder: Path, options: argparse.Namespace) -> Any:
    """Make hosts, if there are links to be cut and this is possible."""
    if not set(options.faults) & set(OF_LINKS):
        return None
    if reason := reason_to_skip():
        print(f"Links are not cut: {reason}.", file=sys.stderr)
        return None
    hosts = Hosts(2, folder)
    stack.callback(hosts.close)
    return hosts


def make_fault_table(outcomes: Sequence[FaultOutcome], limit: float) -> Table:
    """Show what became of runs with a stall limit in seconds."""
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
        "(training completed)" if completed else _shorten(outcome.said),
    ]


def _shorten(text: str) -> str:
    """Return the first line of an error, cut where it is long."""
    line = text.partition("\n")[0].removeprefix("OtherRankError: ")
    return line if len(line) <= _SAID else f"{line[: _SAID - 3]}..."


def to_json(outcome: FaultOutcome) -> dict[str, Any]:
    """Return everything about a fault."""
    return {**dataclasses.asdict(outcome), "said": outcome.said, "is right": outcome.is_right}


if __name__ == "__main__":
    main()

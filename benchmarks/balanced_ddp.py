"""Step times of `balanced_ddp` on two ranks: automatic shares against even and fixed ones, and against `ddp`.

The first rank sleeps three times as long per sample as the second. Fixed splits are searched for the best one. Then the
contenders run in turn, round after round; a ratio is the median of the ratios within rounds, with its 95 % interval.
After a swap of the speeds, the steps are counted until the shares are within 5 % of the new best ones. On equal ranks,
which compute instead of sleeping, `ddp` gets half of the batch on each rank.

Run it with `python benchmarks/balanced_ddp.py --rounds 9`; it takes some minutes, and wants two free cores.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from measuring.command import describe_machine
from measuring.estimates import estimate_median
from measuring.sharing import BATCH, LAST, RANKS, follow, measure
from rich.console import Console
from rich.table import Table

from tests.support.processes import run_processes

TRIED = (8, 12, 14, 16, 18, 20, 24)  # samples of the slow rank
LIMIT = 580.0  # seconds for the runs of one launch


def run(function: Any, *arguments: Any) -> Any:
    """Run a function on both ranks; return the result of rank 0."""
    return run_processes(function, RANKS, *arguments, timeout=LIMIT)[0]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="of each comparison; six give an interval")
    parser.add_argument("--steps", type=int, default=120, help="of each run")
    parser.add_argument("--output", type=Path, help="file for the values, as JSON")
    options = parser.parse_args()
    splits = {f"{slow} and {BATCH - slow}": {"split": [slow, BATCH - slow]} for slow in TRIED}
    searched = run(measure, splits, 1, 2 * LAST)
    best = min(searched, key=lambda name: searched[name][0])
    contenders = {"auto": {}, "even": {"balance": "even"}, best: splits[best]}
    unequal = run(measure, contenders, options.rounds, options.steps)
    equal = run(measure, {"auto": {}, "ddp": None}, options.rounds, options.steps, 512)
    swaps = [run(follow, options.steps) for _ in range(options.rounds)]
    machine = describe_machine()
    table = Table(title=f"balanced_ddp on {RANKS} ranks, batches of {BATCH}")
    for column in ("", "median", "95 %", "target"):
        table.add_column(column, justify="right" if column else "left")
    for title, times, other, target in (
        (f"auto / best fixed split ({best})", unequal, best, "1.03"),
        ("auto / even", unequal, "even", "0.60"),
        ("equal ranks: auto / ddp", equal, "ddp", "1.02"),
    ):
        ratios = [ours / theirs for ours, theirs in zip(times["auto"], times[other], strict=True)]
        estimate = estimate_median(ratios)
        interval = "too few rounds" if estimate is None else f"{estimate.low:.3f} to {estimate.high:.3f}"
        table.add_row(title, f"{median(ratios):.3f}", interval, target)
    table.add_row("steps after a swap of speeds", ", ".join(map(str, swaps)), "", "15")
    console = Console()
    console.print(table)
    console.print(json.dumps(machine))
    if options.output is not None:
        values = {"machine": machine, "searched": searched, "unequal": unequal, "equal": equal, "swaps": swaps}
        options.output.write_text(json.dumps(values, indent=2))


if __name__ == "__main__":
    main()

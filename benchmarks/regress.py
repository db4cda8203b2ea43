"""Step times of this tree beside other commits and beside the usual alternative: `python benchmarks/regress.py BASE`.

The contenders of a cell are the strategy of each BASE, the strategy of this tree (with uncommitted changes), and a
peer. They take turns of a fifth of a second within one run each; a ratio is the median of the ratios within rounds,
with its 95 % interval. A run of all cells with one BASE takes about twelve minutes on two free cores.
"""

import math
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

from measuring.command import start_parser
from measuring.comparison import make_columns
from measuring.contender import Contender, closing_all
from measuring.estimates import estimate_median, format_ratio
from measuring.fitting import fit_in_turns
from measuring.models import DEEP, MANY, SMALL, SMALL_CONV
from measuring.rounds import order_of
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
HERE, PEER = "here", "peer"
STARTS, ROUNDS, TURN, LEAST = 2, 8, 0.2, 4  # new processes, rounds of each, seconds and least steps of a turn


@dataclass(frozen=True)
class Cell:
    """A strategy on a model, and its peer, as orders for `fit_in_turns`."""

    title: str
    ours: dict[str, Any]
    peer: dict[str, Any]

    def is_in(self, tree: Path) -> bool:
        """Whether a tree has the strategy."""
        files = (tree / "lightning_ddp_ext").rglob("*.py")
        return any(f'"{self.ours["strategy"]}"' in file.read_text() for file in files)


def find_cells(many: Iterable[int]) -> Iterator[Cell]:
    """Yield all cells; those that show how the time grows have `many` ranks."""
    for case in (DEEP, SMALL, SMALL_CONV):
        shared = {"ranks": 2, "case": case}
        yield Cell(f"ddp_join, {case} / ddp", {**shared, "strategy": "ddp_join"}, {**shared, "strategy": "ddp"})
    for ranks in many:
        shared = {"ranks": ranks, "case": SMALL}
        yield Cell(f"ddp_join, {ranks} ranks / ddp", {**shared, "strategy": "ddp_join"}, {**shared, "strategy": "ddp"})
    for case in ("transformer", "MLP", MANY):
        for mode in ("none", "reentrant", "nonreentrant"):
            shared = {"ranks": 2, "case": case, "mode": mode}
            peer = {**shared, "strategy": "ddp", "arguments": {"static_graph": mode == "reentrant"}}
            yield Cell(f"ddp_checkpoint, {case}, {mode} / ddp", {**shared, "strategy": "ddp_checkpoint"}, peer)
    for case in ("transformer", "conv net"):
        shared = {"ranks": 1, "case": case, "threads": 2}
        ours = {**shared, "strategy": "balanced_dp", "replicas": 2}
        yield Cell(f"balanced_dp, {case} / one device", ours, {**shared, "strategy": "auto"})
    for case, size in (("transformer", 32), (SMALL, 8)):
        ours = {"ranks": 2, "case": case, "batch_size": size, "strategy": "balanced_ddp"}
        peer = {**ours, "batch_size": size // 2, "strategy": "ddp"}
        yield Cell(f"balanced_ddp, {case}, equal ranks / ddp", ours, peer)
    slow = {"ranks": 2, "case": "conv net", "slowness": {0: 3}, "skip": 45, "strategy": "balanced_ddp"}
    for name, arguments in {"best split": {"split": [16, 48]}, "even": {"balance": "even"}}.items():
        yield Cell(f"balanced_ddp auto, slow rank / {name}", slow, {**slow, "arguments": arguments})


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Put the package of a commit into a temporary folder."""
    archive = subprocess.run(["git", "archive", commit, "lightning_ddp_ext"], cwd=ROOT, check=True, capture_output=True)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
        yield Path(folder).resolve()


def measure(cell: Cell, trees: dict[str, Path], starts: int) -> dict[str, list[float]]:
    """Return the median step times of the contenders in each round, in seconds."""
    able = [name for name, tree in trees.items() if name == PEER or cell.is_in(tree)]
    times: dict[str, list[float]] = {name: [] for name in able}
    for start in range(starts):
        orders = {name: cell.peer if name == PEER else cell.ours for name in able}
        fits = {name: Contender(fit_in_turns, order["ranks"], trees[name]) for name, order in orders.items()}
        with closing_all(fits.values()):
            first = {name: fits[name].run(**order, steps=10).median for name, order in orders.items()}
            steps = {name: max(LEAST, math.ceil(TURN / seconds)) for name, seconds in first.items()}
            for round_ in range(ROUNDS):
                for name in order_of(able, start + round_):
                    times[name].append(fits[name].run(steps=steps[name]).median)
    return times


def compare(times: dict[str, list[float]], one: str, other: str) -> str:
    """Return the ratio of two contenders with its interval, or a dash if one of them has no such strategy."""
    if one not in times or other not in times:
        return "-"
    return format_ratio(estimate_median([a / b for a, b in zip(times[one], times[other], strict=True)]))


def main() -> None:
    """Measure, and print the table."""
    parser = start_parser(__doc__)
    parser.add_argument("bases", metavar="BASE", nargs="+", help="commits to compare with")
    parser.add_argument("--cells", nargs="+", default=[""], help="parts of the titles of the cells that are measured")
    parser.add_argument("--starts", type=int, default=STARTS, help=f"new processes, for {ROUNDS} rounds each")
    parser.add_argument("--ranks", nargs="*", type=int, default=[8, 16], help="numbers of ranks of a small model")
    options = parser.parse_args()
    pairs = [(name, PEER) for name in (*options.bases, HERE)] + [(HERE, name) for name in options.bases]
    title = "Time of a step: " + ", ".join(options.bases) + ", this tree (here) and a peer"
    table = make_columns(title, "cell", "ms", *(f"{one} / {other}" for one, other in pairs), "load")
    console = Console(width=max(130, Console().width))
    with ExitStack() as checkouts:
        trees = {base: checkouts.enter_context(checkout(base)) for base in options.bases} | {HERE: ROOT, PEER: ROOT}
        for cell in find_cells(options.ranks):
            if not any(part in cell.title for part in options.cells):
                continue
            times = measure(cell, trees, options.starts)
            milliseconds = ", ".join(f"{1000 * median(times[name]):.2f}" if name in times else "-" for name in trees)
            row = [cell.title, milliseconds, *(compare(times, *pair) for pair in pairs), f"{os.getloadavg()[0]:.1f}"]
            table.add_row(*row)
            console.print(*row, sep="  ", highlight=False, soft_wrap=True)
    console.print(table)


if __name__ == "__main__":
    main()

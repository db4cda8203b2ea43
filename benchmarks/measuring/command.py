"""What the benchmarks' commands have in common: options, hosting contenders, and what they leave behind."""

import argparse
import functools
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from measuring.contender import Contender, closing_all, count_cores
from measuring.estimates import FEWEST
from measuring.rounds import Burst, Measurement, collect_rounds

STAY = 5  # rounds that the same processes host; each start takes several seconds
_FEWEST_STEPS = 10
_LEAST_WIDTH = 110  # columns of text, below which numbers of the tables are cut

Order = Mapping[str, Any]


def start_parser(document: str | None) -> argparse.ArgumentParser:
    """Return a parser for a program whose documentation is described by its first line."""
    return argparse.ArgumentParser(description=(document or "").partition("\n")[0])


def start_parser_of_rounds(document: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that benchmarks in rounds have."""
    parser = start_parser(document)
    parser.add_argument("--rounds", type=int, default=15, help=f"rounds that have to count, at least {FEWEST}")
    parser.add_argument("--max-rounds", type=int, default=20, help="rounds that are run at most")
    parser.add_argument("--burst", type=float, default=0.7, help="seconds of a contender's turn")
    parser.add_argument("--any-load", action="store_true", help="count rounds however busy the machine was")
    parser.add_argument("--quick", action="store_true", help="see whether it works: one model, short turns, any load")
    parser.add_argument("--output", type=Path, help="folder of the results; by default in runs/benchmarks")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, and make the folder of the results."""
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.burst, options.any_load = FEWEST, 0.05, True
    if not FEWEST <= options.rounds <= options.max_rounds:
        parser.error(f"`--rounds` must be at least {FEWEST} and at most `--max-rounds`, got {options.rounds}.")
    options.output = options.output or Path("runs/benchmarks") / options.strategy
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def write_results(options: argparse.Namespace, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Write what is known so far; called after each part, so that a run that is interrupted keeps what it has."""
    everything = {
        "machine": {**machine, "load averages at the end": os.getloadavg()},
        "options": {name: value for name, value in vars(options).items() if name != "output"},
        **results,
    }
    unfinished = options.output / "results.json.part"
    unfinished.write_text(json.dumps(everything, indent=1))
    unfinished.replace(options.output / "results.json")


def print_tables(options: argparse.Namespace, machine: Mapping[str, Any], *lines: RenderableType) -> None:
    """Show tables, and write them to a file."""
    load = f"Load average before {machine['load averages at the start'][0]:.2f}, after {os.getloadavg()[0]:.2f}."
    with (options.output / "tables.txt").open("w") as file:
        for console in (Console(width=max(Console().width, _LEAST_WIDTH)), Console(file=file, width=_LEAST_WIDTH)):
            console.print(*lines, load, sep="\n\n", highlight=False)


def print_with_load(*parts: RenderableType) -> None:
    """Show tables and texts, and how busy the machine is."""
    load = f"Load average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    Console(width=max(Console().width, _LEAST_WIDTH)).print(*parts, load, sep="\n\n", highlight=False)


def measure(
    what: str,
    carry_out: Callable[..., None],
    orders: Mapping[str, Order],
    options: argparse.Namespace,
    ranks: int = 1,
    may_fail: Collection[str] = (),
) -> tuple[Measurement, dict[str, str]]:
    """Run the rounds of contenders, each an order for the same processes, and show how far they are.

    Return also the last line of the error of each contender of `may_fail` that failed when processes started.
    """
    host = _Host(carry_out, orders, options.burst, ranks, may_fail)

    def show(measurement: Measurement) -> None:
        done = f"{len(measurement.counted)} of {options.rounds} rounds, {len(measurement.rounds)} run"
        print(f"{what}: {done}", file=sys.stderr, flush=True)

    stay = options.rounds if options.quick else STAY
    measurement = collect_rounds(host.start, options.rounds, options.max_rounds, options.any_load, show, stay)
    return measurement, host.failures


@dataclass
class _Host:
    """Starts processes for contenders, again and again, and remembers failures and numbers of steps."""

    carry_out: Callable[..., None]
    orders: Mapping[str, Order]
    burst: float
    ranks: int
    may_fail: Collection[str]
    failures: dict[str, str] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def start(self) -> Iterator[dict[str, Callable[[], Burst]]]:
        """Start processes, and again without a contender that failed: nothing can be known about them after that."""
        while True:
            contender = Contender(self.carry_out, self.ranks)
            with closing_all([contender]):
                if self._warm_up(contender):
                    yield {
                        name: functools.partial(contender.run, **self.orders[name], steps=steps)
                        for name, steps in self.steps.items()
                    }
                    return

    def _warm_up(self, contender: Contender) -> bool:
        """Run every contender once, and find out how many steps fill a burst; return whether none failed."""
        for name in [name for name in self.orders if name not in self.failures]:
            try:
                seconds = contender.run(**self.orders[name], steps=_FEWEST_STEPS).median
            except RuntimeError as error:
                if name not in self.may_fail:
                    raise
                self.failures[name] = str(error).splitlines()[-1]
                self.steps.pop(name, None)
                return False
            self.steps.setdefault(name, max(_FEWEST_STEPS, math.ceil(self.burst / seconds)))
        return True


def describe_machine() -> dict[str, Any]:
    """Return what one has to know to compare the numbers with others."""
    cpu_info = Path("/proc/cpuinfo")
    names = [line for line in cpu_info.read_text().splitlines() if "model name" in line] if cpu_info.exists() else []
    packages = ("torch", "lightning", "lightning-ddp-ext", "numpy")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": names[0].partition(": ")[2] if names else platform.processor(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "cores we may use": count_cores(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
        "load averages at the start": os.getloadavg(),
    }

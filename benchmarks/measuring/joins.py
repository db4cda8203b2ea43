"""What `benchmarks/ddp_join.py` concludes, as tables."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from measuring.estimates import Estimate
from measuring.joining import ACCELERATE, EVEN, JOIN, TAIL
from measuring.redirecting import BACKEND, DIRECT, LARGE, MODE, PASSES, REPLACED, SMALL
from measuring.results import DDP, estimate_to_json
from measuring.rounds import Measurement
from measuring.tables import add_columns, format_estimate, format_milliseconds, format_rounds, start_table

OURS = "ddp_join"
SIZED, UNSIZED = "sized", "un-sized"
SILENT, TALKATIVE = "no collectives", "with collectives"
ALONE, PADDED = "the longer rank alone", "ddp, padded"
PEERS = (ALONE, PADDED, JOIN, ACCELERATE)
WORKS = (PASSES, SMALL, LARGE)
WAYS = (REPLACED, MODE, BACKEND)

_NOTHING = "nothing in place"


def name_contender(*parts: str) -> str:
    """Return what the rounds call a contender."""
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class PairsResult:
    """Some contenders, each compared with its reference.

    Args:
        measurement: Rounds of all contenders.
        pairs: Contenders and their references, by a name of the ratio.
        failures: Why contenders were not measured.
    """

    measurement: Measurement
    pairs: Mapping[str, tuple[str, str]]
    failures: Mapping[str, str] = field(default_factory=dict)

    def ratio(self, name: str) -> Estimate | None:
        """Time of a contender relative to its reference; None if there are too few rounds, or no such contender."""
        pair = self.pairs[name]
        return None if self.failures.keys() & pair else self.measurement.ratio(*pair)

    def to_json(self) -> dict[str, Any]:
        """Return the conclusions and everything that was measured."""
        contenders = dict.fromkeys(name for pair in self.pairs.values() for name in pair if name not in self.failures)
        return {
            "ratios": {name: estimate_to_json(self.ratio(name)) for name in self.pairs},
            "seconds": {name: estimate_to_json(self.measurement.time(name)) for name in contenders},
            "failures": dict(self.failures),
            **self.measurement.to_json(),
        }


def pair_even() -> dict[str, tuple[str, str]]:
    """Return what is compared on even data."""
    return {loader: (name_contender(OURS, loader), name_contender(DDP, loader)) for loader in (SIZED, UNSIZED)}


def pair_uneven() -> dict[str, tuple[str, str]]:
    """Return what is compared on uneven data."""
    return {peer: (OURS, peer) for peer in PEERS}


def pair_tail() -> dict[str, tuple[str, str]]:
    """Return what is compared in the uneven phase."""
    return {
        name_contender(loader, talk): (name_contender(TAIL, loader, talk), name_contender(EVEN, loader, talk))
        for loader in (SIZED, UNSIZED)
        for talk in (SILENT, TALKATIVE)
    }


def pair_redirections() -> dict[str, tuple[str, str]]:
    """Return which ways of redirecting collectives are compared."""
    in_uneven_phase = [(TAIL, work, way) for work in WORKS for way in WAYS]
    even = [(EVEN, work, BACKEND) for work in (SMALL, LARGE)]  # the other ways are not in place then
    return {
        name_contender(phase, work, way): (name_contender(phase, work, way), name_contender(work, DIRECT))
        for phase, work, way in even + in_uneven_phase
    }


def make_even_table(results: Mapping[str, PairsResult], any_load: bool) -> Table:
    """Show the time of a step on even data."""
    table = start_table("Even data: time of a training step in milliseconds, 2 ranks, 1 thread", any_load)
    add_columns(table, "model,\nloaders", DDP, OURS, f"{OURS} / {DDP}", "rounds\ncounted")
    table.caption = f"{table.caption} Aim: at most 1.00."
    _add_pairs(table, results)
    return table


def make_uneven_table(results: Mapping[str, PairsResult], any_load: bool) -> Table:
    """Show the time of a step of the rank that has twice the data of the other one."""
    table = start_table("Uneven data, 2:1: time of the longer rank's steps in milliseconds", any_load)
    add_columns(table, "model,\ncontender", "time", f"{OURS} / this", "rounds\ncounted")
    table.caption = (
        f"{table.caption} {JOIN} and {ACCELERATE}: plain loops, without a Trainer. Padded: the shorter rank repeats"
        f" batches. E: not measured, see below. Aim: at most 1.05 to {ALONE}."
    )
    for model, result in results.items():
        table.add_row(Text(model, "bold"))
        table.add_row(f"  {OURS}", format_milliseconds(result.measurement.time(OURS)))
        for peer in result.pairs:
            if peer in result.failures:
                table.add_row(f"  {peer}", Text("E", "red"))
                continue
            time, ratio = format_milliseconds(result.measurement.time(peer)), format_estimate(result.ratio(peer))
            table.add_row(f"  {peer}", time, ratio, format_rounds(result.measurement))
    return table


def make_uneven_phase_table(results: Mapping[str, PairsResult], any_load: bool) -> Table:
    """Show the time of a step while one of two ranks has run out of data."""
    table = start_table(f"the uneven phase: time of {OURS}'s step in milliseconds", any_load)
    add_columns(table, "model,\nloaders, steps", EVEN, TAIL, f"{TAIL} / {EVEN}", "rounds\ncounted")
    table.caption = (
        f"{table.caption} Collectives: a value that is logged with `sync_dist`, and one that is gathered. Aim: at most"
        " 1.20 without."
    )
    _add_pairs(table, results)
    return table


def _add_pairs(table: Table, results: Mapping[str, PairsResult]) -> None:
    """Add a row for each pair: the time of the reference, that of the contender, and their ratio."""
    for model, result in results.items():
        table.add_row(Text(model, "bold"))
        for name, (contender, reference) in result.pairs.items():
            times = (format_milliseconds(result.measurement.time(one)) for one in (reference, contender))
            table.add_row(f"  {name}", *times, format_estimate(result.ratio(name)), format_rounds(result.measurement))


def make_redirection_table(result: PairsResult) -> Table:
    """Show what each way of redirecting collectives costs, relative to collectives that need not be redirected."""
    title = "Ways to redirect collectives: time relative to a group of just the ranks that have data"
    table = start_table(title, result.measurement.any_load)
    add_columns(table, "phase,\nwork", "direct,\nms", *(way.replace(" ", "\n", 1) for way in WAYS))
    table.caption = f"{table.caption} Rounds counted: {format_rounds(result.measurement)}."
    for phase in (EVEN, TAIL):
        table.add_row(Text(phase, "bold"))
        for work in WORKS:
            names = [name_contender(phase, work, way) for way in WAYS]
            ratios = [format_estimate(result.ratio(name)) if name in result.pairs else _NOTHING for name in names]
            direct = format_milliseconds(result.measurement.time(name_contender(work, DIRECT)))
            table.add_row(f"  {work}", direct, *ratios)
    return table


def explain_failures(results: Mapping[str, PairsResult]) -> Iterable[str]:
    """Say why contenders were not measured, each reason once."""
    return dict.fromkeys(f"{name}: {why}" for result in results.values() for name, why in result.failures.items())

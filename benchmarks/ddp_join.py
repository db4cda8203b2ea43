"""What `ddp_join` costs beside Lightning's `ddp` on even data, and how long uneven data takes with it and with others.

Whole Trainer steps of a tiny, a middle and a convolutional model on two processes with one thread each.
Even data: against `ddp`, with loaders that tell their length and with loaders that do not. Uneven data, twice as much
on one rank: against the time that this rank needs alone, against `ddp` with a shorter rank that repeats batches, and
against torch's `Join` and Accelerate's in plain loops. Uneven phase: a step while one rank has run out of data against
a step while none has, with and without collectives of the user's. Last, three ways to redirect collectives: the
replaced methods of process groups, which `ddp_join` uses, a dispatch mode, and a backend in Python.

All contenders are hosted in turn by the same processes, and new ones come after every few rounds. Ratios are taken
within a round, and a round counts only if other processes left the machine alone meanwhile.

Run it with `python benchmarks/ddp_join.py`; it takes about 25 minutes on a quiet machine, and needs the extra
`benchmark` for its picture and for Accelerate.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from measuring.command import describe_machine, measure, parse, print_tables, start_parser, write_results
from measuring.estimates import Estimate
from measuring.joining import ACCELERATE, EVEN, JOIN, RANKS, TAIL, UNEVEN
from measuring.joins import (
    ALONE,
    OURS,
    PADDED,
    SILENT,
    SIZED,
    TALKATIVE,
    UNSIZED,
    WAYS,
    WORKS,
    PairsResult,
    explain_failures,
    make_even_table,
    make_redirection_table,
    make_uneven_phase_table,
    make_uneven_table,
    name_contender,
    pair_even,
    pair_redirections,
    pair_tail,
    pair_uneven,
)
from measuring.models import TINY
from measuring.picture import draw_ratios
from measuring.redirecting import ACTIVE, DIRECT
from measuring.redirecting import RANKS as REDIRECTING_RANKS
from measuring.results import DDP
from measuring.tables import describe_stolen
from rich.console import RenderableType

MODELS = [TINY, "MLP", "conv net"]
REDIRECTION = "redirection"
PARTS = (EVEN, UNEVEN, TAIL, REDIRECTION)
DRAWN = {
    "even data, to ddp": (EVEN, SIZED),
    "2:1 data, to the longer rank alone": (UNEVEN, ALONE),
    "2:1 data, to padding": (UNEVEN, PADDED),
    "tail, to an even step": (TAIL, name_contender(SIZED, SILENT)),
}


def main() -> None:
    """Measure, and leave tables, numbers and a picture."""
    options = parse_options()
    machine = describe_machine()
    measured: dict[str, dict[str, PairsResult]] = {}
    redirections: PairsResult | None = None

    def write() -> None:
        results: dict[str, Any] = {
            part: {model: result.to_json() for model, result in by_model.items()} for part, by_model in measured.items()
        }
        if redirections is not None:
            results[REDIRECTION] = redirections.to_json()
        write_results(options, machine, results)

    for part in [part for part in MEASURES if part in options.parts]:
        for model in options.models:
            measured.setdefault(part, {})[model] = MEASURES[part](model, options)
            write()
    if REDIRECTION in options.parts:
        redirections = measure_redirections(options)
        write()
    print_tables(options, machine, *make_tables(measured, redirections, options.any_load))
    draw(measured, options)
    print(f"Written to {options.output}.")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = start_parser(__doc__, MODELS, OURS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured")
    return parse(parser, TINY)


def measure_even(model: str, options: argparse.Namespace) -> PairsResult:
    """Measure steps on even data."""
    orders = {
        name_contender(strategy, loader): {"case": model, "way": strategy, "is_sized": loader == SIZED}
        for strategy in (OURS, DDP)
        for loader in (SIZED, UNSIZED)
    }
    measurement, _ = measure(f"{model}, {EVEN}", "measuring.joining", orders, options, RANKS)
    return PairsResult(measurement, pair_even())


def measure_uneven(model: str, options: argparse.Namespace) -> PairsResult:
    """Measure an epoch of two ranks, of which the first has twice the data of the other one."""
    orders: dict[str, dict[str, Any]] = {
        ACCELERATE: {"way": ACCELERATE, "amounts": UNEVEN},  # first, since others start again if it fails
        OURS: {"way": OURS, "amounts": UNEVEN},
        ALONE: {"way": "auto", "ranks": 1},
        PADDED: {"way": DDP},
        JOIN: {"way": JOIN, "amounts": UNEVEN},
    }
    orders = {name: {"case": model, **order} for name, order in orders.items()}
    what = f"{model}, {UNEVEN}"
    measurement, failures = measure(what, "measuring.joining", orders, options, RANKS, may_fail=[ACCELERATE])
    return PairsResult(measurement, pair_uneven(), failures)


def measure_tail(model: str, options: argparse.Namespace) -> PairsResult:
    """Measure steps with and without a rank that has run out of data."""
    orders = {
        name_contender(amounts, loader, talk): {
            "case": model,
            "way": OURS,
            "amounts": amounts,
            "is_sized": loader == SIZED,
            "is_talkative": talk == TALKATIVE,
        }
        for amounts in (EVEN, TAIL)
        for loader in (SIZED, UNSIZED)
        for talk in (SILENT, TALKATIVE)
    }
    measurement, _ = measure(f"{model}, {TAIL}", "measuring.joining", orders, options, RANKS)
    return PairsResult(measurement, pair_tail())


MEASURES = {EVEN: measure_even, UNEVEN: measure_uneven, TAIL: measure_tail}


def measure_redirections(options: argparse.Namespace) -> PairsResult:
    """Measure what redirecting collectives costs in each way."""
    shared = {"ranks": len(ACTIVE)}
    orders: dict[str, dict[str, Any]] = {
        name_contender(work, DIRECT): {"work": work, "way": DIRECT, "in_uneven_phase": False, **shared}
        for work in WORKS
    }
    pairs = pair_redirections()
    orders |= {
        name: {"work": work, "way": way, "in_uneven_phase": phase == TAIL, **shared}
        for phase in (EVEN, TAIL)
        for work in WORKS
        for way in WAYS
        if (name := name_contender(phase, work, way)) in pairs
    }
    measurement, _ = measure("ways to redirect", "measuring.redirecting", orders, options, REDIRECTING_RANKS)
    return PairsResult(measurement, pairs)


def make_tables(
    measured: Mapping[str, Mapping[str, PairsResult]], redirections: PairsResult | None, any_load: bool
) -> list[RenderableType]:
    """Show everything that was measured."""
    makers = {EVEN: make_even_table, UNEVEN: make_uneven_table, TAIL: make_uneven_phase_table}
    tables: list[RenderableType] = [makers[part](by_model, any_load) for part, by_model in measured.items()]
    tables += explain_failures(measured.get(UNEVEN, {}))
    results = [result for by_model in measured.values() for result in by_model.values()]
    if redirections is not None:
        tables.append(make_redirection_table(redirections))
        results.append(redirections)
    tables.append(describe_stolen(result.measurement for result in results))
    return tables


def draw(measured: Mapping[str, Mapping[str, PairsResult]], options: argparse.Namespace) -> None:
    """Draw the ratios that say most, as far as they were measured."""
    series: dict[str, list[Estimate | None]] = {
        label: [result.ratio(name) for result in measured[part].values()]
        for label, (part, name) in DRAWN.items()
        if part in measured
    }
    if series:
        title = f"{OURS} with {RANKS} ranks"
        draw_ratios(title, options.models, series, options.output, any_load=options.any_load)


if __name__ == "__main__":
    main()

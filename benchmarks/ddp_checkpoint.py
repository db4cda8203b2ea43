"""What `ddp_checkpoint` costs beside Lightning's `ddp`, and which backward passes each of them gets right.

Speed: whole Trainer steps of three models on two processes with one thread each, with nothing recomputed in the
backward pass and with reentrant and non-reentrant activation checkpointing, against `ddp` as it is, with
`static_graph`, with `find_unused_parameters`, with `gradient_as_bucket_view` and with `batched_grad_copy`. Memory: what
gradients and buckets take at the peak and between steps, from torch 2.15 on also with `lazy_bucket_allocation`. Peers:
twelve kinds of backward pass in three modes with two optimizers, each compared with one process.

All contenders are hosted in turn by the same pair of processes, and a new pair comes after every few rounds. The
same program started again may be slower or faster by a quarter for as long as it lives: with a pair of processes for
each contender, that would be in every ratio, and starting ten of them for each round would take longer than the steps.
Ratios are taken within a round, and a round counts only if other processes left the machine alone meanwhile.

Run it with `python benchmarks/ddp_checkpoint.py`; it takes about 20 minutes on a quiet machine, and needs the extra
`demo` for its picture.
"""

import argparse
import sys
from dataclasses import asdict
from typing import Any

from measuring.checkpointing import (
    Play,
    SpeedResult,
    explain_failures,
    make_memory_table,
    make_peers_table,
    make_speed_table,
)
from measuring.command import describe_machine, measure, parse, print_tables, start_parser, write_results
from measuring.memory import MemoryUses, measure_memory
from measuring.models import MANY
from measuring.peers import OURS, PEERS, RANKS, Outcome, judge
from measuring.picture import draw_ratios
from measuring.scenarios import MODES, SCENARIOS, Mode, Optimizers
from measuring.tables import describe_stolen
from rich.console import RenderableType

MODELS = ["transformer", "MLP", MANY]
JUDGED = (OURS, "ddp", "static_graph", "find_unused")
PARTS = ("memory", "peers", "speed")


def main() -> None:
    """Measure, and leave tables, numbers and a picture."""
    options = parse_options()
    machine = describe_machine()
    results: dict[str, Any] = {}
    tables: list[RenderableType] = []

    if "memory" in options.parts:
        uses = measure_memory()
        results["memory"] = memory_to_json(uses)
        tables.append(make_memory_table(uses))
        write_results(options, machine, results)
    if "peers" in options.parts:
        outcomes = judge_all(options)
        results["peers"] = [{"who": play[0], "play": play[1:], **asdict(one)} for play, one in outcomes.items()]
        tables.append(make_peers_table(outcomes))
        write_results(options, machine, results)
    if "speed" in options.parts:
        speed: dict[str, dict[Mode, SpeedResult]] = {}
        for model in options.models:
            for mode in MODES:
                speed.setdefault(model, {})[mode] = measure_speed(model, mode, options)
                results.setdefault("speed", {}).setdefault(model, {})[mode] = speed[model][mode].to_json()
                write_results(options, machine, results)
        cells = [cell for by_mode in speed.values() for cell in by_mode.values()]
        tables += [make_speed_table(speed, options.any_load), *explain_failures(speed)]
        tables.append(describe_stolen(cell.measurement for cell in cells))
        draw_ratios(
            f"{OURS} relative to the fastest way of using ddp, {RANKS} ranks",
            list(speed),
            {name_mode(mode): [by_mode[mode].ratio for by_mode in speed.values()] for mode in MODES},
            options.output,
            any_load=options.any_load,
        )
    print_tables(options, machine, *tables)
    print(f"Written to {options.output}.")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = start_parser(__doc__, MODELS, "ddp_checkpoint")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured")
    return parse(parser, "MLP")


def measure_speed(model: str, mode: Mode, options: argparse.Namespace) -> SpeedResult:
    """Measure the training steps of a model in a mode; peers may fail."""
    shared = {"case": model, "mode": mode, "ranks": RANKS}
    orders: dict[str, dict[str, Any]] = {OURS: {**shared, "strategy": OURS}}
    orders |= {name: {**shared, "strategy": "ddp", "flags": flags} for name, flags in PEERS.items()}
    measurement, failures = measure(
        f"{model}, {name_mode(mode)}", "measuring.fitting", orders, options, ranks=RANKS, may_fail=PEERS
    )
    return SpeedResult(measurement, failures)


def judge_all(options: argparse.Namespace) -> dict[Play, Outcome]:
    """Judge ours and the peers in each scenario; in a quick run, with one optimizer in every third scenario."""
    plays: list[Play] = [
        (name, scenario.name, mode, optimizer)
        for scenario in (SCENARIOS[1::3] if options.quick else SCENARIOS)
        for mode in MODES
        for optimizer in list(Optimizers)[: 1 if options.quick else None]
        for name in JUDGED
    ]
    outcomes = {}
    for number, play in enumerate(plays, 1):
        outcomes[play] = judge(*play)
        if not number % 24:
            print(f"peers: {number} of {len(plays)} plays", file=sys.stderr, flush=True)
    return outcomes


def memory_to_json(uses: MemoryUses) -> dict[str, Any]:
    """Return all numbers by name."""
    return {name: {what: asdict(use) for what, use in by_step.items()} for name, by_step in uses.items()}


def name_mode(mode: Mode) -> str:
    """Return what is said of a mode where nothing around it tells what it is a mode of."""
    return "nothing recomputed" if mode == "none" else f"{mode} checkpointing"


if __name__ == "__main__":
    main()

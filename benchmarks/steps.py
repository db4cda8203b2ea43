"""What a strategy costs: the time of whole Trainer steps beside other strategies.

Contenders are hosted in turn by the same processes, with one thread each unless the name says otherwise, and new
processes come after every few rounds: the same program started again may be slower or faster by a quarter for as long
as it lives. Ratios are taken within a round, and a round counts only if other processes left the machine alone.

- `ddp_checkpoint`: two ranks, with nothing recomputed and with two kinds of activation checkpointing, beside the
  fastest way of using Lightning's `ddp`.
- `ddp_join`: two ranks. Even data, beside `ddp`, with loaders that tell their length and without. Uneven data, twice as
  much on one rank, beside this rank alone, `ddp` with a rank that repeats batches, and torch's and Accelerate's joins
  in plain loops. The uneven phase, beside an even step, with and without collectives of the user's.
- `balanced_dp`: two replicas, beside one device with each number of threads and `ddp` with two processes; and its
  overhead with a model that costs nothing.

Run it with `python benchmarks/steps.py STRATEGY`; it takes about 25 minutes on a quiet machine, and needs the extra
`benchmark` for its picture and for Accelerate.
"""

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from measuring.command import describe_machine, measure, parse, print_tables, start_parser_of_rounds, write_results
from measuring.comparison import Comparison, describe_stolen, explain_failures, make_table
from measuring.contender import count_cores
from measuring.fitting import fit
from measuring.joining import ACCELERATE, EVEN, JOIN, TAIL, UNEVEN, train
from measuring.models import CASES, MANY, TINY, TOY
from measuring.peers import PEERS
from measuring.picture import draw_ratios
from measuring.scenarios import MODES, Mode

OURS, DDP = "ours", "ddp"
Orders = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """What is measured with each model."""

    title: str
    orders: Callable[[str], Orders]  # of the contenders for a key of `CASES`
    pairs: Mapping[str, tuple[str, Sequence[str]]]  # a contender and its references, by ratio; the first is drawn
    models: Sequence[str]
    carry_out: Callable[..., None] = fit
    ranks: int = 2
    may_fail: Sequence[str] = ()  # others go on without them


def recomputing(mode: Mode) -> Part:
    """Compare `ddp_checkpoint` with the ways of using `ddp`."""

    def orders(model: str) -> Orders:
        shared = {"case": model, "mode": mode, "ranks": 2}
        peers = {name: {**shared, "strategy": DDP, "flags": flags} for name, flags in PEERS.items()}
        return {OURS: {**shared, "strategy": "ddp_checkpoint"}, **peers}

    title = "nothing recomputed" if mode == "none" else f"{mode} checkpointing"
    return Part(title, orders, {f"to {DDP}": (OURS, [*PEERS])}, ["transformer", "MLP", MANY], may_fail=[*PEERS])


def joining(title: str, pairs: Mapping[str, tuple[str, Sequence[str]]], contenders: Orders, **options: Any) -> Part:
    """Compare `ddp_join` with others."""

    def orders(model: str) -> Orders:
        return {name: {"case": model, **order} for name, order in contenders.items()}

    return Part(title, orders, pairs, [TINY, "MLP", "conv net"], train, **options)


def even_data() -> Part:
    """Give both ranks equally many batches."""
    loaders = {"loaders with a length": True, "loaders without": False}
    contenders = {
        f"{way}, {loader}": {"way": way, "is_sized": is_sized}
        for way, (loader, is_sized) in itertools.product(("ddp_join", DDP), loaders.items())
    }
    pairs = {loader: (f"ddp_join, {loader}", [f"{DDP}, {loader}"]) for loader in loaders}
    return joining("even data", pairs, contenders)


def uneven_data() -> Part:
    """Give the first rank twice the data of the other one."""
    contenders: Orders = {
        ACCELERATE: {"way": ACCELERATE, "amounts": UNEVEN},  # first, since others start again if it fails
        OURS: {"way": "ddp_join", "amounts": UNEVEN},
        "the longer rank alone": {"way": "auto", "ranks": 1},
        f"{DDP}, padded": {"way": DDP},
        JOIN: {"way": JOIN, "amounts": UNEVEN},
    }
    others = ["the longer rank alone", f"{DDP}, padded", JOIN, ACCELERATE]
    pairs = {f"to {other}": (OURS, [other]) for other in others}
    return joining("uneven data, 2:1", pairs, contenders, may_fail=[ACCELERATE])


def uneven_phase() -> Part:
    """Compare steps with and without a rank that has run out of data."""
    steps = {"no collectives": False, "collectives": True}
    contenders = {
        f"{amounts}, {name}": {"way": "ddp_join", "amounts": amounts, "is_talkative": is_talkative}
        for amounts, (name, is_talkative) in itertools.product((EVEN, TAIL), steps.items())
    }
    pairs = {name: (f"{TAIL}, {name}", [f"{EVEN}, {name}"]) for name in steps}
    return joining("the uneven phase, to an even step", pairs, contenders)


def sharing() -> Part:
    """Compare two replicas with one device and with two processes."""
    cores = count_cores()
    alone = {f"one device, threads: {n}": {"strategy": "auto", "threads": n, "ranks": 1} for n in range(1, cores + 1)}
    contenders: Orders = {
        **alone,
        DDP: {"strategy": DDP, "threads": max(1, cores // 2), "ranks": 2},
        OURS: {"strategy": "balanced_dp", "devices": 2, "threads": cores, "ranks": 1},
    }
    pairs = {"to the best one device": (OURS, [*alone]), f"to {DDP}": (OURS, [DDP])}
    models = [case for case in CASES if case not in (MANY, TOY)]
    return Part("two replicas", lambda model: {n: {"case": model, **o} for n, o in contenders.items()}, pairs, models)


def overhead() -> Part:
    """Measure replicas of a model that costs nothing."""
    ours: Orders = {f"replicas: {n}": {"strategy": "balanced_dp", "devices": n} for n in (1, 2, 4)}
    contenders: Orders = {"one device": {"strategy": "auto"}, **ours}
    orders = {name: {"case": TOY, "threads": count_cores(), **order} for name, order in contenders.items()}
    return Part("overhead", lambda _: orders, {name: (name, ["one device"]) for name in ours}, [TOY], ranks=1)


STRATEGIES: dict[str, dict[str, Part]] = {
    "ddp_checkpoint": {mode: recomputing(mode) for mode in MODES},
    "ddp_join": {EVEN: even_data(), UNEVEN: uneven_data(), TAIL: uneven_phase()},
    "balanced_dp": {"steps": sharing(), "overhead": overhead()},
}


def main() -> None:
    """Measure, and leave tables, numbers and a picture."""
    options = parse_options()
    machine, parts = describe_machine(), STRATEGIES[options.strategy]
    measured: dict[str, dict[str, Comparison]] = {}
    for name in options.parts or parts:
        part = parts[name]
        for model in [one for one in part.models if not options.models or one in options.models][: options.most]:
            what = f"{model}, {part.title}"
            orders = part.orders(model)
            rounds, failures = measure(what, part.carry_out, orders, options, part.ranks, part.may_fail)
            measured.setdefault(name, {})[model] = Comparison(rounds, part.pairs, failures)
            results = {key: {one: found.to_json() for one, found in by.items()} for key, by in measured.items()}
            write_results(options, machine, results)
    found = [comparison for by_model in measured.values() for comparison in by_model.values()]
    tables = [make_table(f"{options.strategy}: {parts[name].title}", by_model) for name, by_model in measured.items()]
    stolen = describe_stolen(one.measurement for one in found)
    print_tables(options, machine, *tables, *explain_failures(found), stolen)
    models = [*dict.fromkeys(model for by_model in measured.values() for model in by_model)]
    drawn = {(name, ratio): by_model for name, by_model in measured.items() for ratio in [*parts[name].pairs][:2]}
    series = {
        f"{parts[name].title}, {ratio}": [by_model[one].ratio(ratio) if one in by_model else None for one in models]
        for (name, ratio), by_model in drawn.items()
    }
    draw_ratios(options.strategy, models, series, options.output, any_load=options.any_load)
    print(f"Written to {options.output}.")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = start_parser_of_rounds(__doc__)
    parser.add_argument("strategy", choices=[*STRATEGIES], help="whose steps are measured")
    parser.add_argument("--models", nargs="+", choices=[*CASES], metavar="MODEL", help=", ".join(CASES))
    parser.add_argument("--parts", nargs="+", help="what is measured; by default everything")
    options = parse(parser)
    options.most = 1 if options.quick else None
    if unknown := {*(options.parts or ())} - STRATEGIES[options.strategy].keys():
        parser.error(f"`--parts` of {options.strategy} are {', '.join(STRATEGIES[options.strategy])}, got {unknown}.")
    return options


if __name__ == "__main__":
    main()

"""What `balanced_dp` costs and gains on the CPU: training steps, overheads, and Python's lock.

Whole Trainer steps of four models, against one device with each number of threads and against Lightning's own `ddp`
with two processes. Contenders run in turn within each round, hosted by the same two processes, of which all but `ddp`
use the first; new processes come after every few rounds. Every ratio is taken within a round. A round counts only if
other processes left the machine alone meanwhile. Besides, what the strategy costs by itself, with a model that costs
nothing, and what Python's lock leaves for two threads to gain in a model of many tiny layers.

Run it with `python benchmarks/balanced_dp.py`; it takes about 12 minutes on a quiet machine and at most 20, and needs
the extra `demo` for its picture.
"""

import argparse
from typing import Any

from measuring.command import describe_machine, measure, parse, print_tables, start_parser, write_results
from measuring.contender import count_cores
from measuring.models import CASES, MANY, TINY, TOY
from measuring.picture import draw_ratios
from measuring.results import BALANCED, DDP, LockResult, OverheadResult, StepResult, name_device
from measuring.tables import describe_stolen, explain_lock, make_lock_table, make_overhead_table, make_step_table

LOGGED_KEYS = 10
REPLICAS = (1, 2, 4)
MODELS = [case for case in CASES if case not in (MANY, TOY)]


def main() -> None:
    """Measure, and leave tables, numbers and a picture."""
    options = parse_options()
    machine = describe_machine()
    results: dict[str, Any] = {"steps": {}}
    steps = {}
    for model in options.models:
        steps[model] = measure_steps(model, options)
        results["steps"][model] = steps[model].to_json()
        write_results(options, machine, results)
    overheads = measure_overheads(options)
    results["overheads"] = overheads.to_json()
    write_results(options, machine, results)
    lock = measure_lock(options)
    floor = lock.floor(steps[TINY]) if TINY in steps else None
    results["lock"] = {**lock.to_json(), "floor of the ratio to the best one device": floor}
    write_results(options, machine, results)

    tables = make_step_table(steps), make_overhead_table(overheads), make_lock_table(lock)
    measurements = [result.measurement for result in (*steps.values(), overheads, lock)]
    print_tables(options, machine, *tables, explain_lock(lock, steps.get(TINY)), describe_stolen(measurements))
    draw_ratios(
        f"{BALANCED} with 2 replicas relative to others",
        list(steps),
        {
            "to the best one device": [result.ratio_to_device for result in steps.values()],
            f"to {DDP} with two processes": [result.ratio_to_ddp for result in steps.values()],
        },
        options.output,
        floors={} if floor is None else {TINY: floor},
        any_load=options.any_load,
    )
    print(f"Written to {options.output}.")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = start_parser(__doc__, MODELS, "balanced_dp")
    cores = list(range(1, count_cores() + 1))
    parser.add_argument("--threads", nargs="+", type=int, default=cores, help="numbers tried on one device")
    return parse(parser, TINY)


def measure_steps(model: str, options: argparse.Namespace) -> StepResult:
    """Measure the training steps of a model."""
    cores = count_cores()
    orders: dict[str, dict[str, Any]] = {
        name_device(threads): {"strategy": "auto", "threads": threads, "ranks": 1} for threads in options.threads
    }
    orders[DDP] = {"strategy": "ddp", "threads": max(1, cores // 2), "ranks": 2}
    orders[BALANCED] = {"strategy": "balanced_dp", "devices": 2, "threads": cores, "ranks": 1}
    orders = {name: {"case": model, **order} for name, order in orders.items()}
    measurement, _ = measure(model, "measuring.fitting", orders, options, ranks=2)
    return StepResult(measurement, options.threads)


def measure_overheads(options: argparse.Namespace) -> OverheadResult:
    """Measure fits of a model that costs nothing."""
    strategies: dict[str, dict[str, Any]] = {"one device": {"strategy": "auto"}}
    for replicas in REPLICAS:
        strategies[f"{BALANCED} ({replicas})"] = {"strategy": "balanced_dp", "devices": replicas}
    orders = {
        OverheadResult.name_contender(name, keys): {"case": TOY, "threads": count_cores(), "keys": keys, **strategy}
        for name, strategy in strategies.items()
        for keys in (0, LOGGED_KEYS)
    }
    measurement, _ = measure("overheads", "measuring.fitting", orders, options)
    return OverheadResult(measurement, list(strategies), LOGGED_KEYS)


def measure_lock(options: argparse.Namespace) -> LockResult:
    """Measure bare passes in threads."""
    orders = {
        LockResult.name_contender(direction, threads, share): {
            "direction": direction,
            "threads": threads,
            "share": share,
        }
        for direction in ("forward", "backward")
        for threads, share in LockResult.WAYS
    }
    measurement, _ = measure("Python's lock", "measuring.lock", orders, options)
    return LockResult(measurement)


if __name__ == "__main__":
    main()

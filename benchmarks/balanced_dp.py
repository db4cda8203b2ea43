"""What `balanced_dp` costs and gains on the CPU: training steps, overheads, and Python's lock.

Whole Trainer steps of four models, against one device with each number of threads and against Lightning's own `ddp`
with two processes. Contenders run in turn within each round, as new processes, and every ratio is taken within a round.
A round counts only if nothing else used the machine meanwhile. Besides, what the strategy costs by itself, with a model
that costs nothing, and what Python's lock leaves for two threads to gain in a model of many tiny layers.

Run it with `python benchmarks/balanced_dp.py`; it takes about 20 minutes, and needs the extra `demo` for its picture.
"""

import argparse
import functools
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from measuring.contender import Contender, closing_all, count_cores
from measuring.estimates import FEWEST
from measuring.models import CASES, TINY
from measuring.picture import draw_ratios
from measuring.results import BALANCED, DDP, LockResult, OverheadResult, StepResult, name_device
from measuring.rounds import Burst, Measurement, collect_rounds
from measuring.tables import explain_lock, make_lock_table, make_overhead_table, make_step_table
from rich.console import Console

LOGGED_KEYS = 10
REPLICAS = (1, 2, 4)
_FEWEST_STEPS = 20
_LEAST_WIDTH = 100  # columns of text, below which numbers of the tables are cut

Run = Callable[..., Burst]


def main() -> None:
    """Measure, and leave tables, numbers and a picture."""
    options = parse_options()
    options.output.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    steps = {model: measure_steps(model, options) for model in options.models}
    overheads = measure_overheads(options)
    lock = measure_lock(options)
    machine["load averages at the end"] = os.getloadavg()

    lines = [
        make_step_table(steps),
        make_overhead_table(overheads),
        make_lock_table(lock),
        explain_lock(lock, steps.get(TINY)),
        f"Load average before {machine['load averages at the start'][0]:.2f}, after {os.getloadavg()[0]:.2f}.",
    ]
    with (options.output / "tables.txt").open("w") as file:
        for console in (Console(width=max(Console().width, _LEAST_WIDTH)), Console(file=file, width=_LEAST_WIDTH)):
            console.print(*lines, sep="\n\n", highlight=False)
    results = {
        "machine": machine,
        "options": {name: value for name, value in vars(options).items() if name != "output"},
        "steps": {model: result.to_json() for model, result in steps.items()},
        "overheads": overheads.to_json(),
        "lock": lock.to_json(),
    }
    floor = lock.floor(steps[TINY]) if TINY in steps else None
    results["lock"]["floor of the ratio to the best one device"] = floor
    (options.output / "results.json").write_text(json.dumps(results, indent=1))
    draw_ratios(steps, {} if floor is None else {TINY: floor}, options.output)
    print(f"Written to {options.output}.")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    cores = count_cores()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--models", nargs="+", choices=CASES, default=list(CASES), metavar="MODEL", help=", ".join(CASES)
    )
    parser.add_argument(
        "--threads", nargs="+", type=int, default=list(range(1, cores + 1)), help="numbers tried on one device"
    )
    parser.add_argument("--rounds", type=int, default=15, help=f"rounds that have to count, at least {FEWEST}")
    parser.add_argument("--max-rounds", type=int, default=30, help="rounds that are run at most")
    parser.add_argument("--burst", type=float, default=1.0, help="seconds of a contender's turn")
    parser.add_argument("--any-load", action="store_true", help="count rounds however busy the machine was")
    parser.add_argument("--quick", action="store_true", help="see whether it works: one model, short turns, any load")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks/balanced_dp"), help="folder of the results"
    )
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds, options.burst, options.any_load = [TINY], FEWEST, 0.05, True
    if not FEWEST <= options.rounds <= options.max_rounds:
        parser.error(f"`--rounds` must be at least {FEWEST} and at most `--max-rounds`, got {options.rounds}.")
    return options


def measure_steps(model: str, options: argparse.Namespace) -> StepResult:
    """Measure the training steps of a model, by new processes in each round.

    The same program started again may be faster or slower by a quarter for as long as it lives, depending on where its
    memory happens to lie: with one process per contender, no number of rounds would show that.
    """
    cores = count_cores()
    train = functools.partial(Contender, "measuring.training", model)

    @contextmanager
    def start() -> Iterator[Mapping[str, Callable[[], Burst]]]:
        contenders = {name_device(threads): train("auto", f"--threads={threads}") for threads in options.threads}
        contenders[DDP] = train("ddp", "--devices=2", f"--threads={max(1, cores // 2)}", ranks=2)
        contenders[BALANCED] = train("balanced_dp", "--devices=2", f"--threads={cores}")
        with closing_all(list(contenders.values())):
            yield _prepare({name: contender.run for name, contender in contenders.items()}, options)

    return StepResult(_measure(model, start, options), options.threads)


def measure_overheads(options: argparse.Namespace) -> OverheadResult:
    """Measure fits of a model that costs nothing."""
    strategies: dict[str, dict[str, Any]] = {"one device": {"strategy": "auto", "devices": 1}}
    for replicas in REPLICAS:
        strategies[f"{BALANCED} ({replicas})"] = {"strategy": "balanced_dp", "devices": replicas}
    contender = Contender("measuring.overheads")
    with closing_all([contender]):
        runs = {
            OverheadResult.name_contender(name, keys): functools.partial(contender.run, keys=keys, **strategy)
            for name, strategy in strategies.items()
            for keys in (0, LOGGED_KEYS)
        }
        bursts = _prepare(runs, options)
        measurement = _measure("overheads", lambda: nullcontext(bursts), options)
        return OverheadResult(measurement, list(strategies), LOGGED_KEYS)


def measure_lock(options: argparse.Namespace) -> LockResult:
    """Measure bare passes in threads."""
    contender = Contender("measuring.lock")
    with closing_all([contender]):
        runs = {
            LockResult.name_contender(direction, threads, share): functools.partial(
                contender.run, direction=direction, threads=threads, share=share
            )
            for direction in ("forward", "backward")
            for threads, share in LockResult.WAYS
        }
        bursts = _prepare(runs, options)
        return LockResult(_measure("Python's lock", lambda: nullcontext(bursts), options))


def _prepare(runs: Mapping[str, Run], options: argparse.Namespace) -> Mapping[str, Callable[[], Burst]]:
    """Start contenders up, and find out how many steps fill a burst of each."""
    for run in runs.values():
        run(steps=_FEWEST_STEPS)  # starts up, which keeps the cores busy until the last one has
    bursts = {}
    for name, run in runs.items():
        seconds = run(steps=_FEWEST_STEPS).median
        bursts[name] = functools.partial(run, steps=max(_FEWEST_STEPS, math.ceil(options.burst / seconds)))
    return bursts


def _measure(
    what: str,
    enter: Callable[[], AbstractContextManager[Mapping[str, Callable[[], Burst]]]],
    options: argparse.Namespace,
) -> Measurement:
    """Run the rounds, and say how far they are."""

    def show(measurement: Measurement) -> None:
        done = f"{len(measurement.counted)} of {options.rounds} rounds, {len(measurement.rounds)} run"
        print(f"{what}: {done}", file=sys.stderr, flush=True)

    return collect_rounds(enter, options.rounds, options.max_rounds, options.any_load, show)


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


if __name__ == "__main__":
    main()

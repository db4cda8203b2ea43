"""Step times of `balanced_ddp` on two ranks, against fixed shares, `ddp`, `ddp_join` and `balanced_dp`.

- Unequal ranks: the first one sleeps three times as long per sample as the second. Fixed splits are searched for the
  best one. After a swap of the speeds, the steps are counted until the shares are within 5 % of the new best ones.
- Equal ranks compute. `ddp` and `ddp_join` get half of the batch on each rank, `balanced_dp` has two replicas.
- Sequences of 8 to 512 tokens, most of them short: ranks sleep for the tokens of their share, without and
  with padding.
- 8 virtual ranks on one rank, against the same micro-batches; on two ranks, against one, and against `ddp` with the
  same micro-batches; and the bytes of gradients that a rank sends in a step, relative to an all-reduce.

Contenders run in turn, round after round; a ratio is the median of the ratios within rounds, with its 95 % interval. A
step includes its fetch. Run it with `python benchmarks/balanced_ddp.py --rounds 9`; it takes a quarter of an hour, and
wants two free cores.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from measuring.command import describe_machine, print_with_load, start_parser
from measuring.comparison import make_columns
from measuring.estimates import estimate_median, format_ratio
from measuring.models import DEEP, TINY
from measuring.sharing import (
    BATCH,
    LAST,
    PADDED_LENGTHS,
    RANDOM_LENGTHS,
    RANKS,
    SLEEPING,
    SORTED_LENGTHS,
    count_bytes,
    follow,
    length_of,
    measure,
)

from tests.support.processes import run_processes

TRIED = (8, 12, 14, 16, 18, 20, 24)  # samples of the slow rank
EVEN = {"balance": "even"}
PARTS = 8  # virtual ranks
LIMIT = 580.0  # seconds for the runs of one launch


def run(function: Any, *arguments: Any, ranks: int = RANKS) -> Any:
    """Run a function on all ranks; return the result of rank 0."""
    return run_processes(function, ranks, *arguments, timeout=LIMIT)[0]


class Ratios:
    """The table of ratios."""

    def __init__(self) -> None:
        columns = ("step time", "ratio", "milliseconds", "target")
        self.table = make_columns(f"balanced_ddp on {RANKS} ranks", *columns)

    def add(self, title: str, times: Mapping[str, list[float]], own: str, other: str, target: str = "") -> None:
        """Add the ratio of two contenders."""
        ratios = [ours / theirs for ours, theirs in zip(times[own], times[other], strict=True)]
        milliseconds = " / ".join(f"{1000 * median(times[name]):.1f}" for name in (own, other))
        self.table.add_row(title, format_ratio(estimate_median(ratios)), milliseconds, target)


def main() -> None:
    """Measure, and print the table."""
    parser = start_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="of each comparison; six give an interval")
    parser.add_argument("--steps", type=int, default=120, help="of each run")
    parser.add_argument("--output", type=Path, help="file for the values, as JSON")
    options = parser.parse_args()
    rounds, steps, values, table = options.rounds, options.steps, dict[str, Any](), Ratios()
    machine = describe_machine()

    splits = {f"{slow} and {BATCH - slow}": {"split": [slow, BATCH - slow]} for slow in TRIED}
    searched = values["searched"] = run(measure, splits, SLEEPING, 1, 2 * LAST)
    best = min(searched, key=lambda name: searched[name][0])
    unequal = values["unequal"] = run(measure, {"auto": {}, "even": EVEN, best: splits[best]}, SLEEPING, rounds, steps)
    table.add(f"unequal ranks: auto / best fixed split ({best})", unequal, "auto", best, "1.03")
    table.add("unequal ranks: auto / even", unequal, "auto", "even", "0.60")
    for case in (TINY, "transformer"):
        contenders = {"auto": {}, "even": EVEN, "ddp": "ddp", "ddp_join": "ddp_join"}
        equal = values[case] = run(measure, contenders, case, rounds, steps)
        for other in ("ddp", "ddp_join"):
            table.add(f"equal ranks, {case}: auto / {other}", equal, "auto", other, "1.02" if other == "ddp" else "")
        equal |= {"balanced_dp": [], "auto beside it": []}
        for _ in range(rounds):
            equal["auto beside it"] += run(measure, {"auto": {}}, case, 1, steps)["auto"]
            equal["balanced_dp"] += run(measure, {"dp": "balanced_dp"}, case, 1, steps, ranks=1)["dp"]
        table.add(f"equal ranks, {case}: auto / balanced_dp", equal, "auto beside it", "balanced_dp")
    for work in (RANDOM_LENGTHS, SORTED_LENGTHS, PADDED_LENGTHS):
        cost = "padded_length" if work == PADDED_LENGTHS else length_of
        by_cost = values[work] = run(measure, {"cost": {**EVEN, "cost": cost}, "even": EVEN}, work, rounds, steps)
        table.add(f"{work}: cost / equal counts", by_cost, "cost", "even", "0.80")
    for case in (DEEP, "transformer", "conv net"):
        found = values[f"virtual, {case}"] = {"virtual": [], "micro": [], "two": [], "ddp": []}
        for _ in range(rounds):
            alone = {"virtual": {"virtual_ranks": PARTS, "ranks": 1}, "micro": {"micro_batches": PARTS, "ranks": 1}}
            times = run(measure, alone, case, 1, steps, ranks=1)
            both = {"two": {"virtual_ranks": PARTS}, "ddp": {"strategy": "ddp", "micro_batches": PARTS}}
            times |= run(measure, both, case, 1, steps)
            for name, seconds in times.items():
                found[name] += seconds
        table.add(f"{PARTS} virtual ranks, {case}: one rank / micro-batches", found, "virtual", "micro", "1.05")
        table.add(f"{PARTS} virtual ranks, {case}: two ranks / one", found, "two", "virtual", "0.55")
        table.add(f"{PARTS} virtual ranks, {case}: two ranks / ddp on two ranks", found, "two", "ddp")
    for ranks, target in ((2, "1.00"), (3, "1.6"), (4, "1.00")):
        shares = values[f"bytes on {ranks} ranks"] = run_processes(count_bytes, ranks, ranks, PARTS, timeout=LIMIT)
        table.table.add_row(f"bytes / all-reduce, {ranks} ranks", f"{fmean(shares):.2f}", "", "", target)

    swaps = values["steps after a swap"] = [run(follow, steps) for _ in range(rounds)]
    after_swap = f"Steps after a swap of the speeds (target 15): {', '.join(map(str, swaps))}."
    print_with_load(table.table, after_swap, json.dumps(machine))
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": machine, **values}, indent=2))


if __name__ == "__main__":
    main()

"""Which backward passes `ddp_checkpoint` and torch's `DistributedDataParallel` get right, and the memory of gradients.

Peers: twelve kinds of backward pass in three modes with two optimizers, each compared with one process. Memory: what
gradients and buckets take at the peak and between steps, from torch 2.15 on also with `lazy_bucket_allocation`.

Run it with `python benchmarks/ddp_checkpoint.py`; it takes about ten minutes.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measuring.command import describe_machine, print_with_load, start_parser
from measuring.comparison import make_columns
from measuring.memory import ONE, TWO, MemoryUses, measure_memory
from measuring.peers import OURS, Outcome, judge
from measuring.scenarios import MODES, SCENARIOS, Mode, Optimizers
from rich import box
from rich.table import Table
from rich.text import Text

JUDGED = (OURS, "ddp", "static_graph", "find_unused")
PARTS = ("memory", "peers")
Play = tuple[str, str, Mode, str]
"""Ours or a peer, scenario, mode and optimizer."""


def main() -> None:
    """Measure, and print tables."""
    parser = start_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured")
    parser.add_argument("--quick", action="store_true", help="every third scenario, with one optimizer")
    parser.add_argument("--output", type=Path, help="file for the values, as JSON")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": describe_machine()}
    tables = []
    if "memory" in options.parts:
        uses = measure_memory()
        results["memory"] = {name: {what: asdict(use) for what, use in by.items()} for name, by in uses.items()}
        tables.append(make_memory_table(uses))
    if "peers" in options.parts:
        outcomes = judge_all(options.quick)
        results["peers"] = [{"who": play[0], "play": play[1:], **asdict(one)} for play, one in outcomes.items()]
        tables.append(make_peers_table(outcomes))
    print_with_load(*tables)
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1))


def judge_all(is_quick: bool) -> dict[Play, Outcome]:
    """Judge ours and the peers in each scenario."""
    plays: list[Play] = [
        (name, scenario.name, mode, optimizer)
        for scenario in (SCENARIOS[1::3] if is_quick else SCENARIOS)
        for mode in MODES
        for optimizer in list(Optimizers)[: 1 if is_quick else None]
        for name in JUDGED
    ]
    outcomes = {}
    for number, play in enumerate(plays, 1):
        outcomes[play] = judge(*play)
        if not number % 24:
            print(f"peers: {number} of {len(plays)} plays", file=sys.stderr, flush=True)
    return outcomes


def make_memory_table(uses: MemoryUses) -> Table:
    """Show the memory of gradients of ours and of each peer."""
    table = make_columns(
        "Memory of gradients, in units of their size",
        *("", "peak of\nbackward", "held", "peak, two\naccumulated", "peak,\nfirst step"),
        caption="Beyond the parameters, as counted by torch's allocator; nearly no activations. Held: left between"
        " steps, after zero_grad. The first step of each builds buckets.",
        box=box.SIMPLE_HEAD,
    )
    for name, use in uses.items():
        numbers = (use[ONE].peak, use[ONE].held, use[TWO].peak, use[ONE].first_peak)
        table.add_row(name, *(f"{number:.2f}" for number in numbers))
    return table


def make_peers_table(outcomes: Mapping[Play, Outcome]) -> Table:
    """Show whether gradients are right in each scenario, a letter for each mode."""
    names = list(dict.fromkeys(name for name, *_ in outcomes))
    table = make_columns(
        "Right gradients and identical ranks?",
        "scenario",
        *names,
        caption="Letters: nothing, reentrant, non-reentrant recomputed. P right, E error, H hangs, D ranks drift apart"
        " or are equal but wrong, without a message. "
        f"With {' and '.join(Optimizers)}; both verdicts where they differ.",
        box=box.SIMPLE_HEAD,
    )
    for scenario in dict.fromkeys(scenario for _, scenario, _, _ in outcomes):
        table.add_row(scenario, *(_spell(outcomes, name, scenario) for name in names))
    counts = (count_passed(outcomes, name) for name in names)
    cells = len({play[1:3] for play in outcomes})
    table.add_row(Text(f"right of {cells}", "bold"), *(Text(str(count), "bold") for count in counts))
    return table


def count_passed(outcomes: Mapping[Play, Outcome], name: str) -> int:
    """Count the cells, scenarios by modes, in which ours or a peer was right with every optimizer."""
    cells = {play[1:3] for play in outcomes if play[0] == name}
    failed = {play[1:3] for play, outcome in outcomes.items() if play[0] == name and outcome.letter != "P"}
    return len(cells - failed)


def _spell(outcomes: Mapping[Play, Outcome], name: str, scenario: str) -> Text:
    words = dict.fromkeys(Optimizers, "")
    for (one, of, _, optimizer), outcome in outcomes.items():  # modes in order
        words[optimizer] += outcome.letter if (one, of) == (name, scenario) else ""
    text = Text("/".join(dict.fromkeys(filter(None, words.values()))))
    text.highlight_regex("P", "green")
    text.highlight_regex("[EH]", "red")
    text.highlight_regex("D", "bold red reverse")
    return text


if __name__ == "__main__":
    main()

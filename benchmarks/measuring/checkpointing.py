"""What `benchmarks/ddp_checkpoint.py` concludes, as tables."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from measuring.estimates import Estimate
from measuring.memory import ONE, TWO, MemoryUses
from measuring.peers import OURS, PEERS, Outcome
from measuring.results import estimate_to_json
from measuring.rounds import Measurement
from measuring.scenarios import MODES, Mode, Optimizers
from measuring.tables import add_columns, format_estimate, format_milliseconds, format_rounds, start_table

Play = tuple[str, str, Mode, str]
"""Ours or a peer, scenario, mode and optimizer."""


@dataclass(frozen=True, slots=True)
class SpeedResult:
    """The training steps of one model in one mode.

    Args:
        measurement: Rounds of ours and of the peers that survived.
        failures: The error of each peer that did not.
    """

    measurement: Measurement
    failures: Mapping[str, str]

    @property
    def fastest_peer(self) -> str | None:
        """The fastest peer that survived, or None if there is none or too few rounds count."""
        return self.measurement.fastest(name for name in PEERS if name not in self.failures)

    @property
    def ratio(self) -> Estimate | None:
        """Time of ours relative to the fastest peer."""
        fastest = self.fastest_peer
        return None if fastest is None else self.measurement.ratio(OURS, fastest)

    def to_json(self) -> dict[str, Any]:
        """Return the conclusions and everything that was measured."""
        survivors = [name for name in (OURS, *PEERS) if name not in self.failures]
        return {
            "fastest peer": self.fastest_peer,
            "ratio to the fastest peer": estimate_to_json(self.ratio),
            "ratios": {name: estimate_to_json(self.measurement.ratio(OURS, name)) for name in survivors[1:]},
            "seconds": {name: estimate_to_json(self.measurement.time(name)) for name in survivors},
            "failures": dict(self.failures),
            **self.measurement.to_json(),
        }


def make_speed_table(results: Mapping[str, Mapping[Mode, SpeedResult]], any_load: bool) -> Table:
    """Show the time of a training step of each model in each mode, and the ratio to the fastest peer."""
    table = start_table("Time of a training step in milliseconds; recomputed activations, 2 ranks, 1 thread", any_load)
    names = [name.replace("_", "_\n") for name in (OURS, *PEERS)]
    add_columns(table, "model,\nrecomputed", *names, f"{OURS} /\nfastest peer", "rounds\ncounted")
    table.caption = f"{table.caption} Bold: the fastest peer. E: it stops with an error."
    for model, by_mode in results.items():
        table.add_row(Text(model, "bold"))
        for mode, result in by_mode.items():
            times = [
                Text("E", "red")
                if name in result.failures
                else Text(
                    format_milliseconds(result.measurement.time(name)), "bold" if name == result.fastest_peer else ""
                )
                for name in (OURS, *PEERS)
            ]
            table.add_row(f"  {mode}", *times, format_estimate(result.ratio), format_rounds(result.measurement))
    return table


def make_memory_table(uses: MemoryUses) -> Table:
    """Show the memory of gradients of ours and of each peer."""
    table = Table(
        title="Memory of gradients, in units of their size",
        caption="Beyond the parameters, as counted by torch's allocator; nearly no activations. Held: left between"
        " steps, after zero_grad. The first step of each builds buckets.",
        box=box.SIMPLE_HEAD,
    )
    add_columns(table, "", "peak of\nbackward", "held", "peak, two\naccumulated", "peak,\nfirst step")
    for name, use in uses.items():
        numbers = (use[ONE].peak, use[ONE].held, use[TWO].peak, use[ONE].first_peak)
        table.add_row(name, *(f"{number:.2f}" for number in numbers))
    return table


def make_peers_table(outcomes: Mapping[Play, Outcome]) -> Table:
    """Show whether gradients are right in each scenario, a letter for each mode."""
    names = list(dict.fromkeys(name for name, *_ in outcomes))
    table = Table(
        title="Right gradients and identical ranks?",
        caption="Letters: nothing, reentrant, non-reentrant recomputed. P right, E error, H hangs, D ranks drift apart"
        " or are equal but wrong, without a message. "
        f"With {' and '.join(Optimizers)}; both verdicts where they differ.",
        box=box.SIMPLE_HEAD,
    )
    add_columns(table, "scenario", *names)
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


def _letter(outcomes: Mapping[Play, Outcome], play: Play) -> str:
    return outcomes[play].letter if play in outcomes else ""


def _spell(outcomes: Mapping[Play, Outcome], name: str, scenario: str) -> Text:
    words = (
        "".join(_letter(outcomes, (name, scenario, mode, optimizer)) for mode in MODES) for optimizer in Optimizers
    )
    text = Text("/".join(dict.fromkeys(word for word in words if word)))
    text.highlight_regex("P", "green")
    text.highlight_regex("[EH]", "red")
    text.highlight_regex("D", "bold red reverse")
    return text


def explain_failures(results: Mapping[str, Mapping[Mode, SpeedResult]]) -> Iterable[str]:
    """Say what peers died of."""
    for model, by_mode in results.items():
        for mode, result in by_mode.items():
            for name, why in result.failures.items():
                yield f"{name}, {model}, {mode}: {why}"

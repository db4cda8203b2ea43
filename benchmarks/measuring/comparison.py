"""Contenders that are compared with the fastest of their references, as numbers and as a table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from measuring.estimates import FEWEST, NOT_SOUND, Estimate, estimate_to_json, format_ratio
from measuring.rounds import MOST_BY_OTHERS, Measurement


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rounds of some contenders."""

    measurement: Measurement
    pairs: Mapping[str, tuple[str, Sequence[str]]]  # a contender and its references, by the name of the ratio
    failures: Mapping[str, str] = field(default_factory=dict)  # why contenders were not measured

    def reference(self, name: str) -> str | None:
        """Return the fastest reference that was measured, or None if there is none or too few rounds count."""
        contender, references = self.pairs[name]
        measured = [one for one in references if one not in self.failures]
        return None if contender in self.failures else self.measurement.fastest(measured)

    def ratio(self, name: str) -> Estimate | None:
        """Time of a contender relative to its fastest reference; None without one."""
        reference = self.reference(name)
        return None if reference is None else self.measurement.ratio(self.pairs[name][0], reference)

    def to_json(self) -> dict[str, Any]:
        """Return the conclusions and everything that was measured."""
        names = dict.fromkeys(one for contender, references in self.pairs.values() for one in (contender, *references))
        seconds = {name: estimate_to_json(self.measurement.time(name)) for name in names if name not in self.failures}
        return {
            "ratios": {name: estimate_to_json(self.ratio(name)) for name in self.pairs},
            "references": {name: self.reference(name) for name in self.pairs},
            "seconds": seconds,
            "failures": dict(self.failures),
            **self.measurement.to_json(),
        }


def make_table(title: str, comparisons: Mapping[str, Comparison]) -> Table:
    """Show the times of contenders and of their fastest references by model, and the ratios."""
    caption = "Medians over rounds with exact 95 % intervals; ratios are taken within a round. Bold: the fastest."
    if any(one.measurement.any_load for one in comparisons.values()):
        title += "\nALL ROUNDS COUNT, HOWEVER BUSY THE MACHINE WAS"
    else:
        caption += (
            f" A round counts if other processes had at most {MOST_BY_OTHERS:.0%} of the cores' time in each turn;"
            f' with fewer than {FEWEST} such rounds, "{NOT_SOUND}".'
        )
    options: dict[str, Any] = {"caption": caption, "box": box.SIMPLE_HEAD, "padding": (0, 0, 0, 1)}
    table = make_columns(title, "model", "ms", "relative to", "ratio", "rounds", **options)
    for model, comparison in comparisons.items():
        measurement = comparison.measurement
        table.add_row(Text(model, "bold"), *[""] * 3, f"{len(measurement.counted)} of {len(measurement.rounds)}")
        for name, (contender, references) in comparison.pairs.items():
            fastest = comparison.reference(name)
            others = Text("\n").join(
                Text(f"{one}: {_milliseconds(comparison, one)}", "bold" if one == fastest else "") for one in references
            )
            table.add_row(
                f"  {name}", _milliseconds(comparison, contender), others, format_ratio(comparison.ratio(name))
            )
    return table


def make_columns(title: str, first: str, *others: str, **options: Any) -> Table:
    """Return a table with columns, of which all but the first hold numbers."""
    table = Table(title=title, **options)
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)
    return table


def _milliseconds(comparison: Comparison, name: str) -> str:
    if name in comparison.failures:
        return "error"
    time = comparison.measurement.time(name)
    return "-" if time is None else f"{1000 * time.median:.2f}"


def explain_failures(comparisons: Iterable[Comparison]) -> Iterable[str]:
    """Say why contenders were not measured, each reason once."""
    return dict.fromkeys(f"{name}: {why}" for one in comparisons for name, why in one.failures.items())


def describe_stolen(measurements: Iterable[Measurement]) -> str:
    """Say how much the hypervisor took, which is not held against a round."""
    shares = [measurement.stolen for measurement in measurements]
    return f"A hypervisor took {min(shares):.1%} to {max(shares):.1%} of the cores' time (medians over turns)."

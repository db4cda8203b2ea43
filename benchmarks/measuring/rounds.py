"""Rounds: every contender runs once in each, and only rounds count that had the machine to themselves.

Whether they had is told by the CPU time of processes that are not ours. What a hypervisor takes (steal) is reported but
not held against a round: it grows with how often the contender itself goes to sleep and wakes up, so a limit to it
would be harder on those that communicate more. It cannot be told from the steal that neighbours cause either.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

from measuring.estimates import Estimate, estimate_median

MOST_BY_OTHERS = 0.03  # of the cores' time


@dataclass(frozen=True, slots=True)
class Burst:
    """What a contender did in its turn; times are those of a step in seconds."""

    steps: int
    mean: float  # decides, not the median, because it has what happens only now and then
    median: float
    longest: float
    by_others: float  # share of the cores' time
    stolen: float  # share that a hypervisor took
    extra: dict[str, float] = field(default_factory=dict)


Round = dict[str, Burst]
"""A burst of each contender, in the order in which they ran."""


def is_quiet(round_: Round) -> bool:
    """Whether nothing else used the machine in any of the round's bursts."""
    return all(burst.by_others <= MOST_BY_OTHERS for burst in round_.values())


@dataclass(frozen=True, slots=True)
class Measurement:
    """All rounds of some contenders in order; with `any_load`, those count too that were not quiet."""

    rounds: list[Round]
    any_load: bool

    @property
    def counted(self) -> list[Round]:
        """The rounds that count."""
        return [round_ for round_ in self.rounds if self.any_load or is_quiet(round_)]

    def estimate(self, of_round: Callable[[Round], float]) -> Estimate | None:
        """Estimate the median of what is computed within each round, or return None if too few rounds count."""
        return estimate_median([of_round(round_) for round_ in self.counted])

    def time(self, name: str) -> Estimate | None:
        """Estimate the seconds that a contender takes for a step."""
        return self.estimate(lambda round_: round_[name].mean)

    def ratio(self, name: str, reference: str) -> Estimate | None:
        """Estimate the ratio of two contenders' times."""
        return self.estimate(lambda round_: round_[name].mean / round_[reference].mean)

    def fastest(self, names: Iterable[str]) -> str | None:
        """Return the fastest of some contenders, or None if too few rounds count."""
        times = {name: self.time(name) for name in names}
        known = {name: time.median for name, time in times.items() if time is not None}
        return min(known, key=known.__getitem__, default=None)

    @property
    def stolen(self) -> float:
        """Median share of the cores' time that a hypervisor took, of all bursts."""
        shares = [burst.stolen for round_ in self.rounds for burst in round_.values()]
        return statistics.median(shares) if shares else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return everything that was measured."""
        rounds = [
            {"quiet": is_quiet(round_), "bursts": {name: asdict(burst) for name, burst in round_.items()}}
            for round_ in self.rounds
        ]
        return {
            "rounds counted": len(self.counted),
            "rounds run": len(self.rounds),
            "stolen by a hypervisor": self.stolen,
            "rounds": rounds,
        }


def collect_rounds(
    enter: Callable[[], AbstractContextManager[Mapping[str, Callable[[], Burst]]]],
    wanted: int,
    at_most: int,
    any_load: bool,
    show: Callable[[Measurement], None] = lambda measurement: None,
    stay: int = 1,
) -> Measurement:
    """Run rounds until as many count as are wanted, and call `enter` for new contenders after every `stay` rounds.

    Who begins rotates from round to round, and every other round runs backwards, so that nobody always follows the same
    one.
    """
    measurement = Measurement([], any_load)

    def is_done() -> bool:
        return len(measurement.counted) >= wanted or len(measurement.rounds) >= at_most

    while not is_done():
        with enter() as contenders:
            until = len(measurement.rounds) + stay
            while len(measurement.rounds) < until and not is_done():
                names = order_of(list(contenders), len(measurement.rounds))
                measurement.rounds.append({name: contenders[name]() for name in names})
                show(measurement)
    return measurement


def order_of(names: list[str], round_: int) -> list[str]:
    """Return the order of contenders in a round: who begins rotates, and every other round runs backwards."""
    first = round_ % len(names)
    rotated = names[first:] + names[:first]
    return rotated[::-1] if round_ % 2 else rotated

"""Which rounds count, and what follows from them."""

import math
import random
from contextlib import nullcontext

from measuring.estimates import Estimate, estimate_median
from measuring.rounds import collect_rounds
from measuring.tables import describe_stolen

from tests.benchmarks.measurements import BUSY, QUIET, burst, collect


def test_the_interval_is_the_narrowest_that_holds_the_median_with_95_percent():
    assert estimate_median([1.0] * 5) is None
    for count in range(6, 60):
        values = list(range(1, count + 1))
        random.Random(count).shuffle(values)
        estimate = estimate_median(values)
        below = [sum(math.comb(count, k) for k in range(tail)) / 2**count for tail in range(count)]
        assert estimate.low + estimate.high == count + 1
        assert 1 - 2 * below[estimate.low] >= 0.95, count
        assert 1 - 2 * below[estimate.low + 1] < 0.95, count
        assert estimate.median == (count + 1) / 2


def test_busy_rounds_are_repeated():
    measurement = collect({"a": 1.0, "b": 1.0}, lambda round_: BUSY if round_ in (0, 3) else QUIET)
    assert (len(measurement.counted), len(measurement.rounds)) == (8, 10)
    # Time taken by the hypervisor is reported, and does not make a round busy.
    assert measurement.stolen == 0.5
    assert "50.0% to 50.0%" in describe_stolen([measurement])


def test_who_begins_rotates_and_every_other_round_runs_backwards():
    orders = ["".join(round_) for round_ in collect({"a": 1.0, "b": 1.0, "c": 1.0}).rounds]
    assert orders[:6] == ["abc", "acb", "cab", "cba", "bca", "bac"]


def test_processes_stay_for_some_rounds():
    entered = []

    def enter():
        entered.append(True)
        return nullcontext({"a": lambda: burst(1.0)})

    assert len(collect_rounds(enter, 7, 12, False, stay=3).rounds) == 7
    assert len(entered) == 3


def test_a_load_that_meets_all_contenders_leaves_the_ratio_alone():
    slowdowns = [1.0, 5.0, 2.0, 7.0, 1.5, 3.0]
    measurement = collect({"a": 1.0, "b": 2.0}, wanted=6)
    for round_, slowdown in zip(measurement.rounds, slowdowns, strict=True):
        round_.update({name: burst(one.mean * slowdown) for name, one in round_.items()})
    assert measurement.ratio("a", "b") == Estimate(0.5, 0.5, 0.5)

"""Rounds of a benchmark, estimates from them, and its tables."""

import io
import json
import math
import random
from contextlib import nullcontext

import pytest
from measuring.comparison import Comparison, describe_stolen, explain_failures, make_table
from measuring.estimates import NOT_SOUND, Estimate, estimate_median
from measuring.peers import OURS, judge
from measuring.rounds import MOST_BY_OTHERS, Burst, collect_rounds
from rich.console import Console

from benchmarks.faults import make_fault_table
from tests.strategies.faults import Fault, FaultOutcome

QUIET, BUSY = MOST_BY_OTHERS / 2, MOST_BY_OTHERS * 2


def burst(seconds, by_others=QUIET):
    return Burst(30, seconds, seconds, seconds, by_others, 0.5)


def collect(times, by_others=lambda round_: QUIET, **options):
    """Rounds of contenders that always take the same times."""
    started = []

    def run(name):
        started.append(name)
        return burst(times[name], by_others((len(started) - 1) // len(times)))

    options = {"wanted": 8, "at_most": 12, "any_load": False, **options}
    contenders = {name: lambda name=name: run(name) for name in times}
    return collect_rounds(lambda: nullcontext(contenders), **options)


def printed(*parts, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(*parts)
    assert "…" not in console.file.getvalue()
    return console.file.getvalue()


def test_the_interval_is_the_narrowest_that_holds_the_median_with_95_percent():
    assert estimate_median([1.0] * 5) is None
    for count in range(6, 60):
        values = list(range(1, count + 1))
        random.Random(count).shuffle(values)
        estimate = estimate_median(values)
        below = [sum(math.comb(count, k) for k in range(tail)) / 2**count for tail in range(count)]
        assert estimate.low + estimate.high == count + 1
        assert 1 - 2 * below[estimate.low] >= 0.95 > 1 - 2 * below[estimate.low + 1], count
        assert estimate.median == (count + 1) / 2


def test_busy_rounds_are_repeated_and_the_order_of_contenders_rotates():
    measurement = collect({"a": 1.0, "b": 1.0}, lambda round_: BUSY if round_ in (0, 3) else QUIET)
    assert (len(measurement.counted), len(measurement.rounds)) == (8, 10)
    # Time taken by the hypervisor is reported, and does not make a round busy.
    assert measurement.stolen == 0.5
    assert "50.0% to 50.0%" in describe_stolen([measurement])
    orders = ["".join(round_) for round_ in collect({"a": 1.0, "b": 1.0, "c": 1.0}).rounds]
    assert orders[:6] == ["abc", "acb", "cab", "cba", "bca", "bac"]


def test_processes_stay_for_some_rounds_and_a_load_on_all_contenders_leaves_the_ratio_alone():
    entered = []

    def enter():
        entered.append(True)
        return nullcontext({"a": lambda: burst(1.0)})

    assert len(collect_rounds(enter, 7, 12, False, stay=3).rounds) == 7
    assert len(entered) == 3
    measurement = collect({"a": 1.0, "b": 2.0}, wanted=6)
    for round_, slowdown in zip(measurement.rounds, [1.0, 5.0, 2.0, 7.0, 1.5, 3.0], strict=True):
        round_.update({name: burst(one.mean * slowdown) for name, one in round_.items()})
    assert measurement.ratio("a", "b") == Estimate(0.5, 0.5, 0.5)


PAIRS = {"to the best": ("ours", ["slow", "fast", "failing"]), "to none": ("ours", ["failing"])}


def comparison(**options):
    times = {"ours": 0.012, "slow": 0.02, "fast": 0.01}
    return Comparison(collect(times, **options), PAIRS, {"failing": "UserWarning: no effect"})


def test_the_fastest_reference_that_was_measured_counts_and_failures_are_named_once():
    found = comparison()
    assert (found.reference("to the best"), found.reference("to none")) == ("fast", None)
    assert found.ratio("to the best").median == pytest.approx(1.2)
    assert found.ratio("to none") is None
    written = json.loads(json.dumps(found.to_json()))
    assert written["rounds run"] == 8
    assert written["seconds"].keys() == {"ours", "slow", "fast"}
    assert [*explain_failures([found, found])] == ["failing: UserWarning: no effect"]


def test_a_table_has_no_ratios_without_quiet_rounds():
    def table(**options):
        return printed(make_table("title", {"MLP": comparison(**options)}))

    quiet, busy = table(), table(by_others=lambda round_: BUSY)
    assert all(part in quiet for part in ("1.20 [1.20, 1.20]", "8 of 8", "failing: error"))
    assert ("1.20" in busy, NOT_SOUND in busy, "0 of 12" in busy) == (False, True, True)
    any_load = table(by_others=lambda round_: BUSY, any_load=True)
    assert ("HOWEVER BUSY" in any_load, "1.20" in any_load) == (True, True)


@pytest.mark.slow
def test_known_peers_are_judged_right():
    for name, scenario, mode, letter in (
        (OURS, "frozen before, then thawed", "reentrant", "P"),
        ("ddp", "two backwards of one forward", "none", "E"),
        ("ddp", "frozen before, then thawed", "none", "D"),
    ):
        assert judge(name, scenario, mode, "SGD").letter == letter


def row(rank, error="", value=None):
    return {"rank": rank, "error": error, "value": value, "timed_out": False, "output": ""}


def test_the_outcome_of_a_fault_is_right_if_nothing_hung_broke_or_stayed():
    killed, slow = Fault("kill -9", 1, "tail"), Fault("slow rank", 1, "tail")
    ended = [row(0, "OtherRankError: the process of rank 1 is gone"), row(1)]
    completed = [row(rank, value={"steps": 16}) for rank in range(2)]
    right = [FaultOutcome(killed, 2.0, ended, 3, []), FaultOutcome(slow, 2.0, completed, 3, [])]
    wrong = [
        FaultOutcome(killed, None, ended, 3, []),
        FaultOutcome(killed, 2.0, ended, 3, ["last.ckpt"]),
        FaultOutcome(killed, 2.0, ended, 3, [], left=1),
        FaultOutcome(killed, 2.0, completed, 3, []),
        FaultOutcome(slow, 2.0, ended, 3, []),
    ]
    assert [outcome.is_right for outcome in (*right, *wrong)] == [True] * 2 + [False] * 5
    outcomes = [*right[:1], FaultOutcome(Fault("SIGSTOP", 0, "even"), None, ended, 1, ["half.ckpt"], left=2), right[1]]
    text = printed(make_fault_table(outcomes, 6.0), width=190)
    assert "stall limit of 6 s: 2 of 3 as promised" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["kill"], ["SIGSTOP"], ["slow"])]
    assert rows[0][:6] == ["kill", "-9", "1", "tail", "2.0", "3"]
    assert " ".join(rows[1]) == "SIGSTOP 0 even hung broken: half.ckpt 2 the process of rank 1 is gone"
    assert rows[2][-2:] == ["(training", "completed)"]

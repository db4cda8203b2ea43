"""Rounds of a benchmark, estimates from them, and its tables."""

import io
import json
import math
import random
from contextlib import nullcontext

import pytest
from measuring import joins
from measuring.checkpointing import SpeedResult, make_speed_table
from measuring.estimates import Estimate, estimate_median, floor_of_ratio
from measuring.faults import make_fault_table
from measuring.joining import ACCELERATE, JOIN
from measuring.models import MANY, TINY
from measuring.peers import OURS, PEERS, Outcome, combine, judge
from measuring.results import BALANCED, DDP, LockResult, OverheadResult, StepResult, name_device
from measuring.rounds import MOST_BY_OTHERS, Burst, collect_rounds
from measuring.scenarios import MODES
from measuring.tables import (
    NOT_SOUND,
    describe_stolen,
    explain_lock,
    make_lock_table,
    make_overhead_table,
    make_step_table,
)
from rich.console import Console

from tests.strategies.faults import Fault, FaultOutcome

QUIET, BUSY = MOST_BY_OTHERS / 2, MOST_BY_OTHERS * 2


def burst(seconds, by_others=QUIET):
    return Burst(30, seconds, seconds, seconds, by_others, 0.5, {"start_up": 0.1, "first_step": 0.2})


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


def step_result(**options):
    times = {name_device(1): 0.02, name_device(2): 0.01, DDP: 0.016, BALANCED: 0.008}
    return StepResult(collect(times, **options), [1, 2])


def lock_result(**options):
    ways = [(direction, *way) for direction in ("forward", "backward") for way in LockResult.WAYS]
    return LockResult(collect({LockResult.name_contender(*way): 0.001 * way[1] for way in ways}, **options))


def overhead_result(**options):
    names = ["one device", "balanced_dp (4)"]
    pairs = [(index, name, keys) for index, name in enumerate(names) for keys in (0, 10)]
    times = {OverheadResult.name_contender(name, keys): 0.001 + 0.002 * i + 0.0001 * keys for i, name, keys in pairs}
    return OverheadResult(collect(times, **options), names, 10)


def test_balanced_dp_is_relative_to_the_best_device_and_the_floor_replaces_forward_and_backward():
    steps, lock, overhead = step_result(), lock_result(), overhead_result()
    assert steps.best_device == name_device(2)
    assert (steps.ratio_to_device.median, steps.ratio_to_ddp.median) == pytest.approx((0.8, 0.5))
    assert (floor_of_ratio(10.0, 10.0, 6.0, 6.0), floor_of_ratio(10.0, 8.0, 6.0, 12.0)) == (1.0, 2.0)
    assert lock.floor(steps) == pytest.approx((0.02 - 0.002 + 0.004) / 0.01)
    assert lock.floor(StepResult(steps.measurement, [2])) is overhead.more_per_step("one device") is None
    assert overhead.more_per_step("balanced_dp (4)").median == pytest.approx(0.002)
    assert overhead.per_key("one device").median == pytest.approx(0.0001)
    for result in (steps, lock, overhead):
        assert json.loads(json.dumps(result.to_json()))["rounds run"] == len(result.measurement.rounds)


def test_tables_of_balanced_dp_have_no_ratios_without_quiet_rounds():
    def tables(**options):
        steps, lock = {"transformer": step_result(**options), TINY: step_result(**options)}, lock_result(**options)
        parts = [make_step_table(steps), make_overhead_table(overhead_result(**options)), make_lock_table(lock)]
        return printed(*parts, explain_lock(lock, steps[TINY]))

    quiet, busy = tables(), tables(by_others=lambda round_: BUSY)
    assert all(part in quiet for part in ("0.80 [0.80, 0.80]", "+2.00 [+2.00, +2.00]", "8 of 8"))
    assert NOT_SOUND not in quiet.replace(f'"{NOT_SOUND}"', "")
    assert ("[" in busy, NOT_SOUND in busy, "0 of 12" in busy) == (False, True, True)
    any_load = tables(by_others=lambda round_: BUSY, any_load=True)
    assert (any_load.count("HOWEVER BUSY"), "[" in any_load) == (3, True)


def test_the_fastest_peer_of_ddp_checkpoint_that_survives_is_the_reference():
    def speed(**options):
        times = {OURS: 0.012, **dict.fromkeys(PEERS, 0.02), "static_graph": 0.01}
        del times["bucket_view"]
        return SpeedResult(collect(times, **options), {"bucket_view": "RuntimeError: boom"})

    result = speed()
    assert (result.fastest_peer, result.ratio.median) == ("static_graph", pytest.approx(1.2))
    assert "bucket_view" not in json.loads(json.dumps(result.to_json()))["seconds"]
    assert speed(by_others=lambda round_: BUSY).ratio is None
    table = printed(make_speed_table({MANY: dict.fromkeys(MODES, result)}, any_load=True), width=110)
    assert "batched_" in table  # of torch 2.13


@pytest.mark.slow
def test_known_peers_are_judged_right():
    for name, scenario, mode, letter in (
        (OURS, "frozen before, then thawed", "reentrant", "P"),
        ("ddp", "two backwards of one forward", "none", "E"),
        ("ddp", "frozen before, then thawed", "none", "D"),
    ):
        assert judge(name, scenario, mode, "SGD").letter == letter
    # A rank that does not end is a hang, unless another has an error.
    for letters, combined in (("PH", "H"), ("HE", "E"), ("PD", "D")):
        assert combine([*map(Outcome, letters)]).letter == combined


def pairs_result(pairs, failures=()):
    """Contenders take 0.018 s each, their references 0.02 s."""
    times = {reference: 0.02 for _, reference in pairs.values()} | {one: 0.018 for one, _ in pairs.values()}
    times = {name: time for name, time in times.items() if name not in failures}
    return joins.PairsResult(collect(times), pairs, dict.fromkeys(failures, "UserWarning: no effect"))


def test_a_contender_of_ddp_join_that_failed_has_no_ratio():
    failing = pairs_result(joins.pair_uneven(), [ACCELERATE])
    uneven = {TINY: failing, "MLP": pairs_result(joins.pair_uneven())}
    text = printed(joins.make_uneven_table(uneven, any_load=False), *joins.explain_failures(uneven))
    assert text.count("0.90 [0.90, 0.90]") == 3 + 4
    assert text.count(f"{ACCELERATE}: UserWarning: no effect") == 1
    assert failing.ratio(ACCELERATE) is None
    assert failing.ratio(JOIN).median == pytest.approx(0.9)
    written = json.loads(json.dumps(failing.to_json()))
    assert written["failures"] == {ACCELERATE: "UserWarning: no effect"}
    assert ACCELERATE not in written["seconds"]


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

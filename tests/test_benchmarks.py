"""The benchmarks' own reckoning; nothing here depends on how long anything takes."""

import io
import json
import math
import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from lightning.fabric.utilities.data import sized_len
from measuring import joins
from measuring.checkpointing import (
    SpeedResult,
    count_passed,
    explain_failures,
    make_memory_table,
    make_peers_table,
    make_speed_table,
)
from measuring.command import measure, parse, start_parser
from measuring.contender import Contender, closing_all
from measuring.estimates import Estimate, estimate_median, floor_of_ratio
from measuring.joining import ACCELERATE, JOIN
from measuring.memory import ONE, TWO, MemoryUse
from measuring.models import CASES, MANY, TINY, TOY, load, load_endlessly
from measuring.peers import OURS, Outcome, combine, judge
from measuring.picture import draw_ratios
from measuring.redirecting import ACTIVE, BACKEND, DIRECT, MODE, REPLACED, SMALL
from measuring.redirecting import RANKS as REDIRECTING_RANKS
from measuring.results import BALANCED, DDP, LockResult, OverheadResult, StepResult, name_device
from measuring.rounds import MOST_BY_OTHERS, Burst, collect_rounds
from measuring.scenarios import MODES, SCENARIOS, Optimizers
from measuring.tables import (
    NOT_SOUND,
    describe_stolen,
    explain_lock,
    make_lock_table,
    make_overhead_table,
    make_step_table,
)
from rich.console import Console

ROOT = Path(__file__).parent.parent
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


def step_result(**options):
    return StepResult(
        collect({name_device(1): 0.02, name_device(2): 0.01, DDP: 0.016, BALANCED: 0.008}, **options), [1, 2]
    )


def lock_result(**options):
    ways = [(direction, *way) for direction in ("forward", "backward") for way in LockResult.WAYS]
    times = {LockResult.name_contender(*way): 0.001 * way[1] for way in ways}
    return LockResult(collect(times, **options))


def overhead_result(**options):
    names = ["one device", "balanced_dp (4)"]
    times = {
        OverheadResult.name_contender(name, keys): 0.001 + 0.002 * index + 0.0001 * keys
        for index, name in enumerate(names)
        for keys in (0, 10)
    }
    return OverheadResult(collect(times, **options), names, 10)


@pytest.mark.parametrize("count", range(6, 60))
def test_the_interval_is_the_narrowest_that_holds_the_median_with_95_percent(count):
    values = list(range(1, count + 1))
    random.Random(count).shuffle(values)
    estimate = estimate_median(values)
    below = [sum(math.comb(count, k) for k in range(tail)) / 2**count for tail in range(count)]
    assert estimate.low + estimate.high == count + 1
    assert 1 - 2 * below[estimate.low] >= 0.95
    assert 1 - 2 * below[estimate.low + 1] < 0.95
    assert estimate.median == (count + 1) / 2


def test_five_values_say_nothing_about_the_median():
    assert estimate_median([1.0] * 5) is None
    assert estimate_median([1.0] * 6) == Estimate(1.0, 1.0, 1.0)


def test_busy_rounds_are_repeated():
    measurement = collect({"a": 1.0, "b": 1.0}, lambda round_: BUSY if round_ in (0, 3) else QUIET)
    assert (len(measurement.counted), len(measurement.rounds)) == (8, 10)


def test_one_busy_burst_makes_its_round_busy():
    bursts = iter([QUIET, BUSY] + [QUIET] * 100)
    names = ("a", "b")
    contenders = {name: lambda: burst(1.0, next(bursts)) for name in names}
    measurement = collect_rounds(lambda: nullcontext(contenders), 6, 12, False)
    assert (len(measurement.counted), len(measurement.rounds)) == (6, 7)


def test_rounds_end_at_their_limit():
    measurement = collect({"a": 1.0}, lambda round_: BUSY)
    assert (len(measurement.counted), len(measurement.rounds)) == (0, 12)
    assert measurement.time("a") is None


def test_any_load_counts_all_rounds():
    measurement = collect({"a": 1.0}, lambda round_: BUSY, any_load=True)
    assert (len(measurement.counted), len(measurement.rounds)) == (8, 8)


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


def test_what_a_hypervisor_takes_is_told_and_not_held_against_a_round():
    measurement = collect({"a": 1.0})
    assert len(measurement.counted) == 8
    assert measurement.stolen == 0.5
    assert "50.0% to 50.0%" in describe_stolen([measurement])


def test_a_load_that_meets_all_contenders_leaves_the_ratio_alone():
    slowdowns = [1.0, 5.0, 2.0, 7.0, 1.5, 3.0]
    measurement = collect({"a": 1.0, "b": 2.0}, wanted=6)
    for round_, slowdown in zip(measurement.rounds, slowdowns, strict=True):
        round_.update({name: burst(one.mean * slowdown) for name, one in round_.items()})
    assert measurement.ratio("a", "b") == Estimate(0.5, 0.5, 0.5)


def test_the_best_one_device_is_the_reference():
    result = step_result()
    assert result.best_device == name_device(2)
    assert result.ratio_to_device.median == pytest.approx(0.8)
    assert result.ratio_to_ddp.median == pytest.approx(0.5)


def test_the_floor_replaces_only_forward_and_backward():
    assert floor_of_ratio(10.0, 10.0, 6.0, 6.0) == 1.0
    assert floor_of_ratio(10.0, 8.0, 6.0, 12.0) == 2.0
    lock, steps = lock_result(), step_result()
    assert lock.floor(steps) == pytest.approx((0.02 - 0.002 + 0.004) / 0.01)
    assert lock.floor(StepResult(steps.measurement, [2])) is None


def test_what_a_strategy_costs_is_relative_to_one_device():
    result = overhead_result()
    assert result.more_per_step("one device") is None
    assert result.more_per_step("balanced_dp (4)").median == pytest.approx(0.002)
    assert result.per_key("one device").median == pytest.approx(0.0001)


def print_tables(width, **options):
    file = io.StringIO()
    steps, lock = {"transformer": step_result(**options), TINY: step_result(**options)}, lock_result(**options)
    lines = [make_step_table(steps), make_overhead_table(overhead_result(**options)), make_lock_table(lock)]
    Console(file=file, width=width).print(*lines, explain_lock(lock, steps[TINY]))
    return file.getvalue()


def test_tables_fit_into_100_columns():
    text = print_tables(100)
    assert "…" not in text
    assert "0.80 [0.80, 0.80]" in text
    assert "+2.00 [+2.00, +2.00]" in text
    assert "8 of 8" in text
    assert NOT_SOUND not in text.replace(f'"{NOT_SOUND}"', "")


def test_without_quiet_rounds_there_are_no_ratios():
    text = print_tables(100, by_others=lambda round_: BUSY)
    assert "[" not in text
    assert NOT_SOUND in text
    assert "0 of 12" in text


def test_any_load_is_said_in_every_table():
    text = print_tables(100, by_others=lambda round_: BUSY, any_load=True)
    assert text.count("HOWEVER BUSY") == 3
    assert "[" in text


def test_the_picture_is_drawn_with_and_without_quiet_rounds(tmp_path):
    pytest.importorskip("matplotlib")
    series = {"to one": [step_result().ratio_to_ddp, None], "to another": [None, step_result().ratio_to_device]}
    paths = draw_ratios("ours", ["a", "b"], series, tmp_path, {"a": 0.7}, any_load=True)
    assert [path.name for path in paths] == ["ratios.png", "ratios.svg"]
    assert all(path.stat().st_size for path in paths)
    assert draw_ratios("ours", ["a"], {"to one": [None]}, tmp_path)


def test_results_are_plain_numbers():
    for options in ({}, {"by_others": lambda round_: BUSY}):
        for result in (step_result(**options), overhead_result(**options), lock_result(**options)):
            assert json.loads(json.dumps(result.to_json()))["rounds run"] == len(result.measurement.rounds)


def test_a_contender_that_fails_is_an_error_with_its_last_lines():
    contender = Contender("measuring.missing", "argument")
    with closing_all([contender]), pytest.raises(RuntimeError, match=r"(?s)measuring\.missing argument.*No module"):
        contender.run(steps=1)


@pytest.mark.slow
def test_peers_that_fail_leave_the_others(monkeypatch, tmp_path):
    """The quickest way to fail that there is: a peer whose processes do not even find its case."""
    monkeypatch.setattr(sys, "argv", ["command", "--quick", "--output", str(tmp_path)])
    options = parse(start_parser("", ["MLP"], "test"), "MLP")
    orders = {name: {"case": case, "strategy": "auto"} for name, case in (("good", TOY), ("bad", "missing"))}
    measurement, failures = measure("toys", "measuring.fitting", orders, options, may_fail=["bad"])
    assert failures == {"bad": "KeyError: 'missing'"}
    assert [set(round_) for round_ in measurement.rounds] == [{"good"}] * 6
    with pytest.raises(RuntimeError, match="KeyError: 'missing'"):
        measure("toys", "measuring.fitting", orders, options)


def speed_result(**options):
    times = {OURS: 0.012, "ddp": 0.02, "static_graph": 0.01, "find_unused": 0.03}
    return SpeedResult(collect(times, **options), {"bucket_view": "RuntimeError: boom"})


def test_the_fastest_peer_that_survives_is_the_reference():
    result = speed_result()
    assert result.fastest_peer == "static_graph"
    assert result.ratio.median == pytest.approx(1.2)
    assert "bucket_view" not in json.loads(json.dumps(result.to_json()))["seconds"]
    assert speed_result(by_others=lambda round_: BUSY).ratio is None


def test_tables_of_speed_memory_and_peers_fit_into_100_columns():
    results = {MANY: {mode: speed_result() for mode in MODES}}
    use = {what: MemoryUse(1.5, 1.04, 0.02) for what in (ONE, TWO)}
    outcomes = {
        (name, scenario.name, mode, optimizer): Outcome(letter)
        for name, letter in ((OURS, "P"), ("ddp", "E"), ("static_graph", "H"), ("find_unused", "D"))
        for scenario in SCENARIOS
        for mode in MODES
        for optimizer in Optimizers
    }
    outcomes["ddp", SCENARIOS[0].name, "none", "SGD"] = outcomes["ddp", SCENARIOS[1].name, "none", "SGD"] = Outcome("P")
    outcomes["ddp", SCENARIOS[1].name, "none", "Adam"] = Outcome("P")
    file = io.StringIO()
    tables = make_speed_table(results, any_load=False), make_memory_table({OURS: use}), make_peers_table(outcomes)
    Console(file=file, width=100).print(*tables, *explain_failures(results))
    text = file.getvalue()
    assert "…" not in text
    assert "1.20 [1.20, 1.20]" in text
    assert f"bucket_view, {MANY}, none: RuntimeError: boom" in text
    assert "PEE/EEE" in text
    assert [count_passed(outcomes, name) for name in (OURS, "ddp", "find_unused")] == [36, 1, 0]


@pytest.mark.parametrize(
    ("name", "scenario", "mode", "letter"),
    [
        (OURS, "frozen before, then thawed", "reentrant", "P"),
        ("ddp", "tied weights", "none", "P"),
        ("ddp", "two backwards of one forward", "none", "E"),
        ("ddp", "frozen before, then thawed", "none", "D"),
    ],
)
def test_known_peers_are_judged_right(name, scenario, mode, letter):
    assert judge(name, scenario, mode, "SGD").letter == letter


def test_a_rank_that_does_not_end_is_a_hang_unless_another_has_an_error():
    assert combine([Outcome("P"), Outcome("H")]).letter == "H"
    assert combine([Outcome("H"), Outcome("E", "why")]) == Outcome("E", "why")
    assert combine([Outcome("P"), Outcome("D")]).letter == "D"


def pairs_result(pairs, failures=(), **options):
    """Contenders take 0.018 s each, their references 0.02 s."""
    times = {reference: 0.02 for _, reference in pairs.values()} | {one: 0.018 for one, _ in pairs.values()}
    times = {name: time for name, time in times.items() if name not in failures}
    return joins.PairsResult(collect(times, **options), pairs, dict.fromkeys(failures, "UserWarning: no effect"))


def test_tables_of_uneven_data_fit_into_100_columns():
    uneven = {TINY: pairs_result(joins.pair_uneven(), [ACCELERATE]), "MLP": pairs_result(joins.pair_uneven())}
    file = io.StringIO()
    Console(file=file, width=100).print(
        joins.make_even_table({TINY: pairs_result(joins.pair_even())}, any_load=False),
        joins.make_uneven_table(uneven, any_load=False),
        joins.make_tail_table({TINY: pairs_result(joins.pair_tail())}, any_load=False),
        joins.make_redirection_table(pairs_result(joins.pair_redirections())),
        *joins.explain_failures({**uneven, "conv net": uneven[TINY]}),
    )
    text = file.getvalue()
    assert "…" not in text
    assert text.count("0.90 [0.90, 0.90]") == 2 + 3 + 4 + 4 + 11
    assert text.count("nothing in place") == 3 + 2 + 2
    assert text.count(f"{ACCELERATE}: UserWarning: no effect") == 1


def test_a_contender_that_failed_has_no_ratio():
    result = pairs_result(joins.pair_uneven(), [ACCELERATE])
    assert result.ratio(ACCELERATE) is None
    assert result.ratio(JOIN).median == pytest.approx(0.9)
    written = json.loads(json.dumps(result.to_json()))
    assert written["failures"] == {ACCELERATE: "UserWarning: no effect"}
    assert ACCELERATE not in written["seconds"]


@pytest.mark.parametrize("is_sized", [True, False])
def test_loaders_have_as_many_batches_as_asked_for(is_sized):
    case = CASES[TOY]
    loader = load(7, 2, case.shape, is_sized)
    assert [tuple(inputs.shape) for inputs, _ in loader] == [(2, *case.shape)] * 7
    assert sized_len(loader) == (7 if is_sized else None)
    assert len(list(zip(range(20), load_endlessly(2, case.shape), strict=False))) == 20


def test_every_way_of_redirecting_reaches_the_ranks_that_have_data():
    """The contender fails if the sum over these ranks is not that of these ranks."""
    contender = Contender("measuring.redirecting", ranks=REDIRECTING_RANKS)
    ways = [(DIRECT, False), (BACKEND, False), (REPLACED, True), (MODE, True), (BACKEND, True)]
    with closing_all([contender]):
        for way, in_tail in ways:
            assert contender.run(ranks=len(ACTIVE), work=SMALL, way=way, in_tail=in_tail, steps=10).steps == 10
        with pytest.raises(RuntimeError, match="KeyError: 'missing'"):
            contender.run(ranks=len(ACTIVE), work=SMALL, way="missing", in_tail=True, steps=10)


@pytest.mark.exhaustive
def test_a_quick_run_leaves_tables_numbers_and_pictures(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "balanced_dp.py", "--quick", "--output", tmp_path]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True, cwd=tmp_path).stdout
    assert "Floor: two threads" in printed
    assert {"tables.txt", "results.json"} <= {path.name for path in tmp_path.iterdir()}
    assert json.loads((tmp_path / "results.json").read_text())["steps"][TINY]["rounds counted"] == 6


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_quick_run_of_ddp_checkpoint_leaves_tables_numbers_and_pictures(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "ddp_checkpoint.py", "--quick", "--output", tmp_path]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=580, check=True, cwd=tmp_path).stdout
    assert "right of 12" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert {one["letter"] for one in results["peers"] if one["who"] == OURS} == {"P"}
    assert results["speed"]["MLP"]["reentrant"]["rounds counted"] == 6
    assert results["memory"][OURS][ONE]["peak"] <= 1.05
    assert results["memory"][OURS][ONE]["held"] <= 0.05


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_quick_run_of_ddp_join_leaves_tables_numbers_and_pictures(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "ddp_join.py", "--quick", "--output", tmp_path]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=580, check=True, cwd=tmp_path).stdout
    assert "Ways to redirect collectives" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["even"][TINY]["rounds counted"] == results["tail"][TINY]["rounds counted"] == 6
    assert set(results["uneven"][TINY]["failures"]) <= {ACCELERATE}
    assert all(results["redirection"]["ratios"].values())
    assert {"tables.txt", "results.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_signals_at_random_moments_end_runs_that_resume(tmp_path):
    output = tmp_path / "counts.json"
    command = [sys.executable, ROOT / "benchmarks" / "preemption.py", "--signals", "10", "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(output.read_text())
    assert counts["signals"] == counts["clean ends"] == counts["loadable checkpoints"] == 10
    assert counts["chains that ended as the whole run"] == counts["chains that came to their end"]

"""What the benchmark of `balanced_dp` says about its measurements."""

import io
import json

import pytest
from measuring.estimates import floor_of_ratio
from measuring.models import TINY
from measuring.picture import draw_ratios
from measuring.results import BALANCED, DDP, LockResult, OverheadResult, StepResult, name_device
from measuring.tables import (
    NOT_SOUND,
    explain_lock,
    make_lock_table,
    make_overhead_table,
    make_step_table,
)
from rich.console import Console

from tests.benchmarks.measurements import BUSY, collect


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

"""What the benchmark of `ddp_checkpoint` says about its measurements, and how it judges others."""

import io
import json

import pytest
from measuring.checkpointing import (
    SpeedResult,
    count_passed,
    explain_failures,
    make_memory_table,
    make_peers_table,
    make_speed_table,
)
from measuring.memory import ONE, TWO, MemoryUse
from measuring.models import MANY
from measuring.peers import OURS, Outcome, combine, judge
from measuring.scenarios import MODES, SCENARIOS, Optimizers
from rich.console import Console

from tests.benchmarks.measurements import BUSY, collect


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scenario", "mode", "letter"),
    [
        (OURS, "frozen before, then thawed", "reentrant", "P"),
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

"""Processes that host contenders, and the benchmarks' commands in runs that are as short as they can be."""

import json
import re
from pathlib import Path

import pytest
from measuring.contender import Contender, closing_all
from measuring.joining import ACCELERATE
from measuring.memory import ONE
from measuring.models import TINY
from measuring.peers import OURS

from tests.support.programs import run_python

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def train(orders, steps):
    orders.reply([1.0 / steps] * steps)


def test_a_contender_reports_its_steps_and_one_that_fails_is_an_error_with_its_last_lines():
    contender = Contender(train, ranks=2)
    with closing_all([contender]):
        for steps in (2, 4):
            burst = contender.run(steps=steps)
            assert (burst.steps, burst.mean) == (steps, 1.0 / steps)
        with pytest.raises(RuntimeError, match=r"(?s)test_running\.train.*exit code 1.*ZeroDivisionError"):
            contender.run(steps=0)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", ["ddp_checkpoint", "ddp_join", "balanced_dp"])
def test_a_benchmark_leaves_tables_pictures_and_numbers(tmp_path, strategy):
    run_python(BENCHMARKS / "steps.py", strategy, "--quick", "--output", tmp_path, limit=580, cwd=tmp_path)
    assert {"tables.txt", "results.json", "ratios.png", "ratios.svg"} <= {path.name for path in tmp_path.iterdir()}
    assert "…" not in (tmp_path / "tables.txt").read_text()
    results = json.loads((tmp_path / "results.json").read_text())
    measured = [one for part in results.values() for one in part.values() if isinstance(one, dict) and "ratios" in one]
    assert len(measured) >= 2
    assert {one["rounds counted"] for one in measured} == {6}
    assert {name for one in measured for name in one["failures"]} <= {ACCELERATE, "find_unused"}


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_peers_are_judged_and_memory_is_measured(tmp_path):
    output = tmp_path / "values.json"
    done = run_python(BENCHMARKS / "ddp_checkpoint.py", "--quick", "--output", output, limit=580)
    assert "right of 12" in done.stdout
    results = json.loads(output.read_text())
    assert {one["letter"] for one in results["peers"] if one["who"] == OURS} == {"P"}
    assert results["memory"][OURS][ONE]["peak"] <= 1.05
    assert results["memory"][OURS][ONE]["held"] <= 0.05


@pytest.mark.slow
def test_the_tree_is_paired_with_a_commit_and_a_peer():
    done = run_python(BENCHMARKS / "regress.py", "HEAD", "--cells", "small MLP / ddp", "--starts", 1)
    rows = [line for line in done.stdout.splitlines() if line.startswith("ddp_join, small MLP / ddp")]
    assert len(rows) == 1
    assert len(re.findall(r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]", rows[0])) == 3


@pytest.mark.slow
def test_signals_at_random_moments_end_runs_that_resume(tmp_path):
    output = tmp_path / "counts.json"
    run_python(BENCHMARKS / "preemption.py", "--signals", 4, "--output", output)
    counts = json.loads(output.read_text())
    assert counts["signals"] == counts["clean ends"] == counts["loadable checkpoints"] == 4
    assert counts["chains that ended as the whole run"] == counts["chains that came to their end"]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_ranks_that_share_a_batch_are_measured(tmp_path):
    output = tmp_path / "values.json"
    options = ["--rounds", 1, "--steps", 40, "--output", output]
    run_python(BENCHMARKS / "balanced_ddp.py", *options, limit=580, env={"PYTHONPATH": str(ROOT)})
    values = json.loads(output.read_text())
    assert len(values["unequal"]["auto"]) == len(values[TINY]["balanced_dp"]) == len(values["steps after a swap"]) == 1

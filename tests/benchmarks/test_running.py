"""Processes that host contenders, and the benchmarks' commands in runs that are as short as they can be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from measuring.contender import Contender, closing_all
from measuring.joining import ACCELERATE
from measuring.memory import ONE
from measuring.models import TINY
from measuring.peers import OURS
from measuring.redirecting import ACTIVE, BACKEND, DIRECT, MODE, RANKS, REPLACED, SMALL

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def test_a_contender_that_fails_is_an_error_with_its_last_lines():
    contender = Contender("measuring.missing", "argument")
    with closing_all([contender]), pytest.raises(RuntimeError, match=r"(?s)measuring\.missing argument.*No module"):
        contender.run(steps=1)


@pytest.mark.slow
def test_every_way_of_redirecting_reaches_the_ranks_that_have_data():
    """The contender fails if the sum over these ranks is wrong."""
    ways = [(DIRECT, False), (BACKEND, False), (REPLACED, True), (MODE, True), (BACKEND, True)]
    options = {"ranks": len(ACTIVE), "work": SMALL, "steps": 10}
    with closing_all([contender := Contender("measuring.redirecting", ranks=RANKS)]):
        for way, in_uneven_phase in ways:
            assert contender.run(way=way, in_uneven_phase=in_uneven_phase, **options).steps == 10


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_benchmarks_leave_tables_pictures_and_numbers(tmp_path):
    def run(name):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--output", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=True, cwd=folder)
        assert {"tables.txt", "results.json", "ratios.png", "ratios.svg"} <= {path.name for path in folder.iterdir()}
        assert "…" not in (folder / "tables.txt").read_text()
        return done.stdout, json.loads((folder / "results.json").read_text())

    printed, results = run("balanced_dp")
    assert "Floor: two threads" in printed
    assert results["steps"][TINY]["rounds counted"] == 6
    printed, results = run("ddp_checkpoint")
    assert "right of 12" in printed
    assert {one["letter"] for one in results["peers"] if one["who"] == OURS} == {"P"}
    assert results["speed"]["MLP"]["reentrant"]["rounds counted"] == 6
    assert results["memory"][OURS][ONE]["peak"] <= 1.05
    assert results["memory"][OURS][ONE]["held"] <= 0.05
    printed, results = run("ddp_join")
    assert "Ways to redirect collectives" in printed
    assert results["even"][TINY]["rounds counted"] == results["tail"][TINY]["rounds counted"] == 6
    assert set(results["uneven"][TINY]["failures"]) <= {ACCELERATE}
    assert all(results["redirection"]["ratios"].values())


@pytest.mark.slow
def test_signals_at_random_moments_end_runs_that_resume(tmp_path):
    output = tmp_path / "counts.json"
    command = [sys.executable, BENCHMARKS / "preemption.py", "--signals", "10", "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(output.read_text())
    assert counts["signals"] == counts["clean ends"] == counts["loadable checkpoints"] == 10
    assert counts["chains that ended as the whole run"] == counts["chains that came to their end"]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_ranks_that_share_a_batch_are_measured(tmp_path):
    output = tmp_path / "values.json"
    command = [sys.executable, BENCHMARKS / "balanced_ddp.py", "--rounds", "1", "--steps", "40", "--output", output]
    subprocess.run(command, capture_output=True, timeout=580, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    values = json.loads(output.read_text())
    assert values["messages"]["auto"] == values["messages"]["ddp_join"]
    assert len(values["unequal"]["auto"]) == len(values[TINY]["balanced_dp"]) == len(values["steps after a swap"]) == 1

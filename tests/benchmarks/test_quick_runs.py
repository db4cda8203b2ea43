"""The benchmarks' commands, in runs that are as short as they can be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from measuring.joining import ACCELERATE
from measuring.memory import ONE
from measuring.models import TINY
from measuring.peers import OURS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_quickly(name, folder):
    """Return what a benchmark prints, and its results."""
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--output", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=True, cwd=folder)
    assert {"tables.txt", "results.json"} <= {path.name for path in folder.iterdir()}
    return done.stdout, json.loads((folder / "results.json").read_text())


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_benchmarks_leave_tables_and_numbers(tmp_path):
    folders = {name: tmp_path / name for name in ("balanced_dp", "ddp_checkpoint", "ddp_join")}
    for folder in folders.values():
        folder.mkdir()
    printed, results = run_quickly("balanced_dp", folders["balanced_dp"])
    assert "Floor: two threads" in printed
    assert results["steps"][TINY]["rounds counted"] == 6
    printed, results = run_quickly("ddp_checkpoint", folders["ddp_checkpoint"])
    assert "right of 12" in printed
    assert {one["letter"] for one in results["peers"] if one["who"] == OURS} == {"P"}
    assert results["speed"]["MLP"]["reentrant"]["rounds counted"] == 6
    assert results["memory"][OURS][ONE]["peak"] <= 1.05
    assert results["memory"][OURS][ONE]["held"] <= 0.05
    printed, results = run_quickly("ddp_join", folders["ddp_join"])
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

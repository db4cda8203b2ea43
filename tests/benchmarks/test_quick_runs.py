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

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]


def run_quickly(name, folder):
    """Return what a benchmark prints, and its results."""
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--output", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=True, cwd=folder)
    assert {"tables.txt", "results.json"} <= {path.name for path in folder.iterdir()}
    return done.stdout, json.loads((folder / "results.json").read_text())


def test_balanced_dp_leaves_tables_and_numbers(tmp_path):
    printed, results = run_quickly("balanced_dp", tmp_path)
    assert "Floor: two threads" in printed
    assert results["steps"][TINY]["rounds counted"] == 6


def test_ddp_checkpoint_leaves_tables_and_numbers(tmp_path):
    printed, results = run_quickly("ddp_checkpoint", tmp_path)
    assert "right of 12" in printed
    assert {one["letter"] for one in results["peers"] if one["who"] == OURS} == {"P"}
    assert results["speed"]["MLP"]["reentrant"]["rounds counted"] == 6
    assert results["memory"][OURS][ONE]["peak"] <= 1.05
    assert results["memory"][OURS][ONE]["held"] <= 0.05


def test_ddp_join_leaves_tables_and_numbers(tmp_path):
    printed, results = run_quickly("ddp_join", tmp_path)
    assert "Ways to redirect collectives" in printed
    assert results["even"][TINY]["rounds counted"] == results["tail"][TINY]["rounds counted"] == 6
    assert set(results["uneven"][TINY]["failures"]) <= {ACCELERATE}
    assert all(results["redirection"]["ratios"].values())

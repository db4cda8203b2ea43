"""The benchmark of signals, with few of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "preemption.py"


@pytest.mark.slow
def test_signals_at_random_moments_end_runs_that_resume(tmp_path):
    output = tmp_path / "counts.json"
    command = [sys.executable, BENCHMARK, "--signals", "10", "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(output.read_text())
    assert counts["signals"] == counts["clean ends"] == counts["loadable checkpoints"] == 10
    assert counts["chains that ended as the whole run"] == counts["chains that came to their end"]

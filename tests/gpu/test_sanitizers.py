"""A few steps of each strategy under CUDA's memory checker and torch's checker of streams.

`python -m tests.gpu.test_sanitizers STRATEGY ACCELERATOR` trains alone.
"""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.gpu.training import STRATEGIES, Regression, Task, train_here
from tests.support import devices
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
LIMIT = 280  # seconds
TOOLS = {
    "memcheck": [
        "compute-sanitizer", "--tool=memcheck", "--report-api-errors=no", "--error-exitcode=9", "--launch-timeout=0",
    ],
    "streams": [],
}  # fmt: skip
VARIABLES = {
    "memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # blocks of the cache would hide accesses beyond a tensor
    "streams": {"TORCH_CUDA_SANITIZER": "1"},
}


def start(name, tool):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"MASTER_PORT": str(free_port())}
    environment |= VARIABLES[tool] if devices.accelerator() == "cuda" else {}
    command = [*TOOLS[tool], sys.executable, "-m", "tests.gpu.test_sanitizers", name, devices.accelerator()]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="module")
def started():
    """All programs at once: a checker makes a step take minutes."""
    programs = {}
    for tool, command in TOOLS.items():
        if not command or (shutil.which(command[0]) and devices.accelerator() == "cuda"):
            programs |= {(name, tool): start(name, tool) for name in STRATEGIES}
    yield programs
    for program in programs.values():
        program.kill()
        program.wait()


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_is_found(started, name, tool):
    if (name, tool) not in started:
        pytest.skip("needs CUDA and compute-sanitizer")
    output, _ = started[name, tool].communicate(timeout=LIMIT)
    assert started[name, tool].returncode == 0, output[-4000:]
    assert "trained" in output
    assert "ERROR SUMMARY: 0 errors" in output or tool != "memcheck"


def network():
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Tanh(), nn.Linear(64, 16))


def main(name, accelerator):
    """Train two replicas, or one rank, for three steps."""
    devices.choose(accelerator)
    if accelerator == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    task = Task(partial(Regression, network), sizes=((4, 4, 4),))
    ended = train_here(task, task.batches(0), STRATEGIES[name](), 2 if name == "balanced_dp" else 1)
    assert len(ended.gradients) == 3
    print("trained")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One step of each strategy under CUDA's memory checker and torch's checker of streams."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.training import STRATEGIES
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
    command = [*TOOLS[tool], sys.executable, "-m", "tests.gpu.one_step", name, devices.accelerator()]
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

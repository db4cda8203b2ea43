"""torchrun itself, which restarts workers on a store that holds what the dead ones have left."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import free_port

PROGRAM = Path(__file__).parent / "torchrun_program.py"


@pytest.mark.slow
@pytest.mark.parametrize("meeting_place", ["the agent's store", "a store of ours"])
def test_workers_find_each_other_again_after_restarts(tmp_path, meeting_place):
    own = [] if meeting_place == "the agent's store" else [f"tcp://127.0.0.1:{free_port()}"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", str(PROGRAM), str(tmp_path), *own,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("died-*"))) == 2
    for rank in range(2):
        assert (tmp_path / f"finished-{rank}").read_text().startswith("2.0 gloo over ")

"""torchrun itself, which restarts workers on a store that holds what the dead ones have left.

torchrun starts this file as the program of its workers: each attempt creates a process group, and rank 1 dies twice.
"""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext.distributed.process_group import init_process_group
from tests.support.ports import free_port


@pytest.mark.slow
@pytest.mark.parametrize("meeting_place", ["the agent's store", "a store of ours"])
def test_workers_find_each_other_again_after_restarts(tmp_path, meeting_place):
    own = [] if meeting_place == "the agent's store" else [f"tcp://127.0.0.1:{free_port()}"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", "-m", __name__, str(tmp_path), *own,
    ]  # fmt: skip
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("died-*"))) == 2
    for rank in range(2):
        assert (tmp_path / f"finished-{rank}").read_text().startswith("2.0 gloo over ")


def work(folder, init_method=None):
    """Add up ones; rank 1 dies in the middle of the first two process groups."""
    rank = int(os.environ["RANK"])
    network = init_process_group(
        backend="gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]), main_address=os.environ["MASTER_ADDR"],
        main_port=int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=60), init_method=init_method,
        network_interface="auto",
    )  # fmt: skip
    value = torch.tensor(1.0)
    dist.all_reduce(value)
    attempts = len(list(folder.glob("died-*")))
    if rank == 1 and attempts < 2:
        (folder / f"died-{attempts}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    (folder / f"finished-{rank}").write_text(f"{value.item()} {network}")
    dist.destroy_process_group()


if __name__ == "__main__":
    work(Path(sys.argv[1]), *sys.argv[2:])

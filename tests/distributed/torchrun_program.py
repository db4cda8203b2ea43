"""What torchrun starts in `test_torchrun_integration.py`: every worker dies once, in the middle of a process group."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_ddp_ext.distributed.process_group import init_process_group

folder, init_method = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
rank = int(os.environ["RANK"])
network = init_process_group(
    backend="gloo",
    rank=rank,
    world_size=int(os.environ["WORLD_SIZE"]),
    main_address=os.environ["MASTER_ADDR"],
    main_port=int(os.environ["MASTER_PORT"]),
    timeout=timedelta(seconds=60),
    init_method=init_method,
    network_interface="auto",
)
value = torch.tensor(1.0)
dist.all_reduce(value)
attempts = len(list(folder.glob("died-*")))
if rank == 1 and attempts < 2:
    (folder / f"died-{attempts}").touch()
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
(folder / f"finished-{rank}").write_text(f"{value.item()} {network}")
dist.destroy_process_group()

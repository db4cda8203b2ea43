"""What ranks do in the network tests; imported by every process, and cheap apart from torch and Lightning."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ddp_ext import DDPJoinStrategy, ManualEnvironment
from lightning_ddp_ext.distributed.process_group import init_process_group
from lightning_ddp_ext.strategies.connected import ConnectedDDPStrategy


def join(*, delay=0.0, umask=None, **settings):
    """Create the process group, add up the ranks, and return the chosen network."""
    time.sleep(delay)
    if umask is not None:
        os.umask(umask)
    settings = {"backend": "gloo", "timeout": 10, **settings}
    settings["timeout"] = timedelta(seconds=settings["timeout"])
    network = init_process_group(**settings)
    listening = sorted({c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN})
    group = dist.new_group()  # reads the environment again
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value, group=group)
    variables = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    dist.barrier()
    dist.destroy_process_group()
    return {"sum": value.item(), "network": str(network), "listening": listening, **variables}


class SocketTable(Callback):
    """Lists the addresses of this process while it trains."""

    def __init__(self):
        self.listening, self.connected = set(), set()

    def on_train_batch_end(self, *args):
        for connection in psutil.Process().net_connections(kind="inet"):
            listens = connection.status == psutil.CONN_LISTEN
            address = connection.laddr.ip.removeprefix("::ffff:")  # IPv4 over a socket of IPv6
            (self.listening if listens else self.connected).add(address)


def train(*, main_address, main_port, num_nodes=1, node_rank=0, rank=0, world_size=1, strategy="ddp", **settings):
    """Train through the Trainer: one rank per node, as `cluster=manual` does, or the ranks of one node."""
    torch.manual_seed(0)
    plugins = []
    if num_nodes > 1:
        place = {"num_nodes": num_nodes, "node_rank": node_rank, "main_address": main_address}
        plugins = [ManualEnvironment(**place, main_port=main_port)]
    else:
        os.environ.update(MASTER_ADDR=main_address, MASTER_PORT=str(main_port), LOCAL_RANK=str(rank))
    settings["timeout"] = timedelta(seconds=settings.get("timeout", 10))
    table, module = SocketTable(), BoringModel()
    chosen = DDPJoinStrategy if strategy == "ddp_join" else ConnectedDDPStrategy
    trainer = Trainer(
        strategy=chosen(**settings),
        accelerator="cpu", devices=1 if num_nodes > 1 else world_size, num_nodes=num_nodes, plugins=plugins,
        callbacks=[table], max_steps=2, limit_val_batches=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module)
    return {
        "steps": trainer.global_step,
        "weight": module.layer.weight.tolist(),
        "rank": trainer.global_rank,
        "listening": sorted(table.listening),
        "connected": sorted(table.connected),
    }


def train_with_fault(**settings):
    """Train with a fault, see `faults`."""
    from tests.strategies import faults

    return faults.train(**settings)


def diagnose(*, arguments, folder):
    """Run `lightning-ddp-ext doctor`; only what it writes to standard output is returned."""
    from lightning_ddp_ext.cli.main import main  # not every program pays for Hydra

    path = Path(folder) / f"stdout-{os.getpid()}"
    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), 1)
    os.environ.setdefault("COLUMNS", "120")
    sys.argv = ["lightning-ddp-ext", "doctor", *arguments]
    code = None
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    sys.stdout.flush()
    return {"code": code, "stdout": path.read_text()}

"""What ranks do in the network tests; imported by every process, and cheap apart from torch and Lightning."""

import os
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import ManualEnvironment
from lightning_ddp_ext.integration.connecting import Connection
from lightning_ddp_ext.network.process_group import init_process_group
from lightning_ddp_ext.strategies.upstream import ConnectedDDPStrategy


def join(**settings):
    """Make the process group with ours, add up the ranks, and say what was chosen."""
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


def join_with_torch_alone(*, rank, world_size, main_address, main_port, timeout, init_method=None):
    """The same by torch."""
    os.environ.update(MASTER_ADDR=main_address, MASTER_PORT=str(main_port))
    dist.init_process_group("gloo", init_method, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return {"sum": value.item()}


def leave_behind(*, rank, world_size, path):
    """Join through a file and die."""
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=world_size)
    dist.barrier()
    os.kill(os.getpid(), 9)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(*, num_nodes, node_rank, main_address, main_port, **settings):
    """Train through the Trainer, one rank per host, as `cluster=manual` does."""
    torch.manual_seed(0)
    environment = ManualEnvironment(
        num_nodes=num_nodes, node_rank=node_rank, main_address=main_address, main_port=main_port
    )
    settings["timeout"] = timedelta(seconds=settings.get("timeout", 10))
    trainer = Trainer(
        strategy=ConnectedDDPStrategy(Connection(**settings)),
        accelerator="cpu",
        devices=1,
        num_nodes=num_nodes,
        plugins=[environment],
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2))
    return {"steps": trainer.global_step, "weight": module.layer.weight.tolist(), "rank": trainer.global_rank}

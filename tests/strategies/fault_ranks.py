"""Training under `ddp_join` in which one rank gets into trouble; imported by the process that forks the ranks."""

import os
import shutil
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy, ManualEnvironment

# In batches. Rank 1 has fewer, so that batch 6 is in the uneven phase, where rank 1 makes shadow steps.
COUNTS = (8, 4)
VALIDATION = 3
WHEN = {"even": 2, "tail": 6, "validation": 1}
CHECKPOINTS = "checkpoints"
_BEATS = 1.5  # seconds after which heartbeats say where a rank is, however short the steps are


class Network(LightningModule):
    """Large enough that a checkpoint is not a detail of a disk."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Trouble(Callback):
    """Makes a fault of `FAULTS` in a phase of the first epoch, and writes its time into a folder."""

    def __init__(self, fault: str, culprit: int, phase: str, folder: Path, limit: float) -> None:
        self.fault, self.culprit, self.phase, self.folder, self.limit = fault, culprit, phase, folder, limit

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.phase != "validation" and trainer.current_epoch == 0 and batch_idx == WHEN[self.phase]:
            self._act(trainer)

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if self.phase == "validation" and trainer.current_epoch == 0 and args[2] == WHEN["validation"]:
            self._act(trainer)

    def _act(self, trainer: Trainer) -> None:
        is_culprit = trainer.global_rank == self.culprit
        if is_culprit:
            time.sleep(_BEATS)
            part = self.folder / "fault.part"
            part.write_text(str(time.monotonic()))
            part.replace(self.folder / "fault")
        FAULTS[self.fault](self, trainer, is_culprit)


def _on_culprit(act):
    return lambda trouble, trainer, is_culprit: act(trouble) if is_culprit else None


def _fail(trouble: Trouble) -> None:
    raise ArithmeticError("boom")


def _fill_disk(trouble: Trouble, trainer: Trainer, is_culprit: bool) -> None:
    """Save a checkpoint to a disk that has become full."""
    folder = trouble.folder / CHECKPOINTS
    if trainer.is_global_zero:
        (folder / "filler").write_bytes(bytes(max(0, shutil.disk_usage(folder).free - 65536)))
    trainer.save_checkpoint(folder / "full.ckpt")


def _lose_folder(trouble: Trouble, trainer: Trainer, is_culprit: bool) -> None:
    """Save a checkpoint to a folder that has become a link to nowhere, as on a file system that is gone."""
    folder = trouble.folder / CHECKPOINTS
    if trainer.is_global_zero:
        folder.rename(folder.with_name("vanished"))
        folder.symlink_to(trouble.folder / "nowhere" / "at" / "all")
    trainer.save_checkpoint(folder / "lost.ckpt")


def _wait_for_cut(trouble: Trouble) -> None:
    """Wait until the link has been cut."""
    deadline = time.monotonic() + 30
    while not (trouble.folder / "cut").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


FAULTS = {
    "none": _on_culprit(lambda trouble: None),
    "kill -9": _on_culprit(lambda trouble: os.kill(os.getpid(), signal.SIGKILL)),
    "SIGSTOP": _on_culprit(lambda trouble: os.kill(os.getpid(), signal.SIGSTOP)),
    "exception": _on_culprit(_fail),
    "out of memory": _on_culprit(lambda trouble: torch.empty(2**50)),
    "full disk": _fill_disk,
    "vanished folder": _lose_folder,
    "slow rank": _on_culprit(lambda trouble: time.sleep(1.5 * trouble.limit)),
    "link cut for 4 s": _on_culprit(_wait_for_cut),
    "link cut": _on_culprit(_wait_for_cut),
}
OF_CHECKPOINTS = ("full disk", "vanished folder")  # written by rank 0 only
OF_LINKS = ("link cut for 4 s", "link cut")
GO_ON = ("none", "slow rank", "link cut for 4 s")  # training completes


def train(
    *,
    rank: int,
    main_port: int,
    folder: str,
    fault: str,
    culprit: int,
    phase: str,
    limit: float,
    strategy: str = "ddp_join",
    main_address: str = "127.0.0.1",
    hosts: bool = False,
    workers: int = 0,
) -> dict[str, Any]:
    """Train two epochs on this rank of two; returns what is left of the run."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    counts = COUNTS if strategy == "ddp_join" else (COUNTS[0],) * 2
    batches = [torch.randn(4, 8) for _ in range(counts[rank])]
    kind = DDPJoinStrategy if strategy == "ddp_join" else DDPCheckpointStrategy
    limits = {"timeout": timedelta(minutes=10), "stall_timeout": timedelta(seconds=limit)}
    environment = LightningEnvironment()
    if hosts:
        environment = ManualEnvironment(num_nodes=2, node_rank=rank, main_address=main_address, main_port=main_port)
    else:
        os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR=main_address, MASTER_PORT=str(main_port))
    trainer = Trainer(
        strategy=kind(process_group_backend="gloo", network_interface="auto", **limits),
        accelerator="cpu",
        devices=1 if hosts else 2,
        num_nodes=2 if hosts else 1,
        plugins=[environment],
        max_epochs=2,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Trouble(fault, culprit, phase, Path(folder), limit),
            ModelCheckpoint(Path(folder) / CHECKPOINTS, every_n_train_steps=2, save_top_k=-1),
        ],
    )
    loader = DataLoader(batches, batch_size=None, num_workers=workers)
    trainer.fit(Network(), loader, DataLoader([torch.randn(4, 8) for _ in range(VALIDATION)], batch_size=None))
    return {"steps": trainer.global_step}

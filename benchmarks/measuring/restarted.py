"""A training run that torchrun restarts when one of its processes has been killed: it resumes from its last checkpoint.

Run by torchrun as `restarted.py FOLDER AGENTS`. Processes write what they do into the folder.
"""

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import DDPJoinStrategy
from measuring.fitting import make_trainer
from measuring.leaving import Classifier, digest_of

SAMPLES = 1200
BATCH = 3
EVERY = 10  # steps between two checkpoints
_PAUSE = 0.004  # seconds in each step, so that there is time to be killed


class _Reporter(Callback):
    """Says which process is which rank, and at which step it has begun."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        draft = self._folder / f"draft-{trainer.global_rank}"
        draft.write_text(f"{trainer.global_rank} {trainer.global_step}")
        draft.replace(self._folder / f"started-{os.getpid()}")

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(_PAUSE)


def main(folder: Path, agents: int) -> None:
    """Train, from the last checkpoint if there is one."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)  # deals the samples out
    torch.manual_seed(int(os.environ["RANK"]) + 10 * int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(SAMPLES, 6, generator=generator)
    data = TensorDataset(features, features[:, :3].argmax(1))
    module = Classifier()
    saving = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=EVERY, save_last=True, save_top_k=1)
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    options = {"num_nodes": agents, "max_epochs": 1, "default_root_dir": folder, "enable_checkpointing": True}
    trainer = make_trainer(DDPJoinStrategy(), _Reporter(folder), saving, devices=devices, plugins=[], **options)
    trainer.fit(module, DataLoader(data, BATCH, shuffle=True), ckpt_path="last", weights_only=True)
    (folder / f"digest-{trainer.global_rank}").write_text(digest_of(module, trainer.optimizers[0]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

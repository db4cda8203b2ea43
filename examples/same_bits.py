"""One hash for a run on one rank, on two, and on two that becomes one in the middle of an epoch.

Run it with `python examples/same_bits.py`. The network has batch normalisation and dropout, which depend on how a batch
is divided: without them, `balanced_ddp` computes the same gradients on any number of ranks, up to rounding. With
`virtual_ranks=8`, eight parts of each batch have their own statistics and random numbers, whichever rank computes them,
and one tree adds their gradients.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import BalancedDDPStrategy
from lightning_ddp_ext.consistency import hash_training_state

STEPS = 10  # in two epochs
INTERRUPTED = 3  # step after which one rank continues


class Classifier(pl.LightningModule):
    """Classifies points by the quadrant in which they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the cross-entropy."""
        points, quadrants = batch
        return functional.cross_entropy(self.network(points), quadrants)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(virtual_ranks: int | None, devices: int, steps: int = STEPS, folder: Path | None = None) -> str:
    """Train on some ranks, from the checkpoint in the folder if there is one; return the hash of the training state."""
    pl.seed_everything(0, verbose=False)
    points = torch.randn(160, 2, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(points, 2 * (points[:, 0] > 0) + (points[:, 1] > 0))
    keeping = [] if folder is None else [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)]
    trainer = pl.Trainer(
        strategy=BalancedDDPStrategy(virtual_ranks=virtual_ranks), accelerator="cpu", devices=devices,
        callbacks=keeping, max_epochs=2, max_steps=steps, logger=False, enable_checkpointing=folder is not None,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Classifier()
    saved = None if folder is None else folder / f"step={INTERRUPTED}.ckpt"
    path = saved if saved is not None and steps > INTERRUPTED else None
    trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True), ckpt_path=path)
    return hash_training_state(module, trainer.optimizers)


def run(*arguments: object) -> str:
    """Call `train` in a process of its own, with an empty text for None; return the hash."""
    texts = ["" if one is None else str(one) for one in arguments]
    os.environ["OMP_NUM_THREADS"] = "1"  # bits depend on the number of threads, which Lightning divides among ranks
    done = subprocess.run([sys.executable, __file__, *texts], check=True, text=True, stdout=subprocess.PIPE)
    return done.stdout.split()[-1]


def main() -> None:
    """Train on one rank and on two, with and without the option, and continue a run of two ranks on one."""
    hashes = {(parts, ranks): run(parts, ranks, STEPS) for parts in (8, None) for ranks in (1, 2)}
    with tempfile.TemporaryDirectory() as folder:
        run(8, 2, INTERRUPTED, folder)
        continued = run(8, 1, STEPS, folder)
    for (parts, ranks), found in hashes.items():
        print(f"virtual_ranks={parts}, ranks: {ranks}, hash {found[:16]}")
    print(f"virtual_ranks=8, ranks: 2 for {INTERRUPTED} steps, then 1, hash {continued[:16]}")
    if {hashes[8, 2], continued} != {hashes[8, 1]} or hashes[None, 1] == hashes[None, 2]:
        raise SystemExit("the runs do not compare as they should")


if __name__ == "__main__" and len(sys.argv) == 1:
    main()
elif __name__ == "__main__":
    parts, devices, steps, *folders = sys.argv[1:]
    found = train(int(parts) if parts else None, int(devices), int(steps), *map(Path, folders))
    if dist.get_rank() == 0:
        print(found)
    dist.destroy_process_group()

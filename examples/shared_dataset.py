"""Four ranks share one copy of a dataset in memory.

Run it with `python examples/shared_dataset.py [MEGABYTES]`. Lightning calls `prepare_data` in one process of each
machine; it writes the tensors into a file. In `setup` every rank maps the file, whose pages the kernel keeps once for
all of them. A process that is killed leaves no memory behind, and no incomplete file of that name.
"""

import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_ext  # noqa: F401  registers "balanced_ddp"

RANKS, WIDTH = 4, 1024


class Rows(pl.LightningDataModule):
    """Random rows, which every rank maps; with `is_mapped=False` it reads a copy of its own."""

    def __init__(self, path: Path, megabytes: int, is_mapped: bool) -> None:
        super().__init__()
        self.path, self.is_mapped = path, is_mapped
        self.samples = megabytes * 2**20 // (WIDTH * torch.float32.itemsize)

    def prepare_data(self) -> None:
        """Write the file unless it exists, under another name until it is complete."""
        if not self.path.exists():
            unfinished = self.path.with_suffix(".unfinished")
            torch.save({"rows": torch.randn(self.samples, WIDTH)}, unfinished)
            unfinished.replace(self.path)

    def setup(self, stage: str) -> None:
        """Load the file, and print the memory that its rows take on all ranks."""
        before = psutil.Process().memory_full_info().pss  # n processes that share a page count 1/n of it each
        rows = torch.load(self.path, mmap=self.is_mapped, weights_only=True)["rows"]
        self.train = TensorDataset(rows)
        rows.sum()  # a page is read when it is used
        assert self.trainer is not None
        strategy = self.trainer.strategy
        strategy.barrier()
        taken = torch.tensor(float(psutil.Process().memory_full_info().pss - before))
        taken = strategy.reduce(taken, reduce_op="sum")
        if self.trainer.is_global_zero:
            how = "mapped" if self.is_mapped else "read"
            print(f"{how}: {RANKS} ranks take {taken / rows.nbytes:.2f} times the size of the data", flush=True)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return batches of 64 rows."""
        return DataLoader(self.train, batch_size=64)


class Network(pl.LightningModule):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return a loss."""
        loss: Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main(folder: Path, megabytes: int) -> None:
    """Train on four ranks; Lightning runs this file again for the others."""
    torch.set_num_threads(1)
    for is_mapped in (True, False):
        trainer = pl.Trainer(
            strategy="balanced_ddp", accelerator="cpu", devices=RANKS, max_steps=5, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(Network(), datamodule=Rows(folder / f"rows_{megabytes}.pt", megabytes, is_mapped))


if __name__ == "__main__":
    main(Path(tempfile.gettempdir()), int(sys.argv[1]) if len(sys.argv) > 1 else 100)

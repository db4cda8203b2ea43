"""Two devices, one three times as fast: it gets three quarters of every batch, and the gradient stays exact.

Run it with `python examples/unequal_gpus.py`. Sleeping simulates the slower device. `balanced_ddp` shares whole batches
and measures the speed of the ranks. Under `ddp_checkpoint` a sampler gives each rank its part of every batch. With
different batch sizes no rank waits for another. `ddp` would give a sample of the slower rank three times the weight of
a sample of the faster rank, as the last line shows.
"""

import time
from collections.abc import Iterator, Sequence

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, TensorDataset

import lightning_ddp_ext  # noqa: F401  registers "balanced_ddp" and "ddp_checkpoint"

MILLISECONDS = [1.0, 3.0]  # per sample of each rank


class Shares(Sampler[list[int]]):
    """The part of each batch for one rank; `shares` are the samples of each rank in a full batch."""

    def __init__(self, samples: int, shares: Sequence[int], rank: int) -> None:
        self.samples = samples
        self.batch_size = sum(shares)
        self.begin, self.end = sum(shares[:rank]), sum(shares[: rank + 1])
        self.generator = torch.Generator().manual_seed(0)  # the same order on every rank, different in every epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's samples, batch by batch."""
        for batch in torch.randperm(self.samples, generator=self.generator).split(self.batch_size):
            begin, end = (len(batch) * edge // self.batch_size for edge in (self.begin, self.end))
            yield batch[begin:end].tolist()

    def __len__(self) -> int:
        """Return the number of batches, the same on every rank."""
        return -(-self.samples // self.batch_size)


class Regression(pl.LightningModule):
    """Learns a function of four numbers, with `shares` samples per batch for each rank, or one share for all."""

    def __init__(self, shares: Sequence[int]) -> None:
        super().__init__()
        self.shares = shares
        self.network = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the loader of this rank."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(400, 4, generator=generator, dtype=torch.float64)
        data = TensorDataset(inputs, inputs.prod(dim=1, keepdim=True))
        rank = self.trainer.global_rank if len(self.shares) > 1 else 0
        return DataLoader(data, batch_sampler=Shares(len(data), self.shares, rank))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the mean over this rank's samples."""
        inputs, targets = batch
        if self.trainer.world_size > 1:
            time.sleep(len(inputs) * MILLISECONDS[self.trainer.global_rank] / 1000)
        return functional.mse_loss(self.network(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Clock(pl.Callback):
    """Measures the training."""

    seconds = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self.seconds = -time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self.seconds += time.perf_counter()


def train(strategy: str, shares: Sequence[int]) -> tuple[Tensor, pl.Trainer, float]:
    """Train for five epochs from the same start, on two ranks or alone; return parameters, Trainer and seconds."""
    pl.seed_everything(0, verbose=False)
    module, clock = Regression(shares), Clock()
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1 if strategy == "auto" else 2, precision="64-true", max_epochs=5,
        callbacks=[clock], use_distributed_sampler=False, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module)
    return nn.utils.parameters_to_vector(module.parameters()).detach(), trainer, clock.seconds


def main() -> None:
    """Train on two ranks; Lightning runs this file again for the second rank."""
    torch.set_num_threads(1)
    runs = [("ddp_checkpoint", (16, 16)), ("ddp_checkpoint", (24, 8)), ("balanced_ddp", (32,)), ("ddp", (24, 8))]
    results = [train(strategy, shares) for strategy, shares in runs]
    by_rank = [torch.empty_like(results[1][0]) for _ in range(2)]
    dist.all_gather(by_rank, results[1][0])
    dist.barrier()  # torch 2.6 may hang where a group is destroyed right after a collective on tensors
    dist.destroy_process_group()
    if not results[0][1].is_global_zero:
        return
    alone, _, _ = train("auto", (32,))
    differences = []
    for (strategy, shares), (parameters, _, seconds) in zip(runs, results, strict=True):
        differences.append(float((parameters - alone).abs().max()))
        sizes = " and ".join(map(str, shares))
        print(f"{strategy}, {sizes} samples: {seconds:.1f} s; difference to one process {differences[-1]:.1e}")
    between_ranks = float((by_rank[0] - by_rank[1]).abs().max())
    print(f"difference between the ranks of ddp_checkpoint: {between_ranks}")
    if between_ranks != 0 or max(differences[:3]) > 1e-9 or differences[3] < 1e-3:
        raise SystemExit("the runs do not compare as they should")


if __name__ == "__main__":
    main()

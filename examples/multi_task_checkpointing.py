"""Two tasks with a backward pass each, and layers recomputed by reentrant checkpoints: exact on two ranks.

Run it with `python examples/multi_task_checkpointing.py`. The shared layers get gradients from both backward passes,
and checkpoints compute them in separate backward passes. torch's `DistributedDataParallel` raises an error here, also
with `find_unused_parameters` or `static_graph`. The same module is trained on two ranks and in one process.
"""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_ddp_ext  # noqa: F401  registers "ddp_checkpoint"

BATCH = 20  # samples of an optimizer step, on all ranks together


class TwoTasks(pl.LightningModule):
    """Predicts the kind and the frequency of a noisy wave; independent of the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 24)
        self.trunk = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24), nn.LayerNorm(24)) for _ in range(3)
        )
        self.kind = nn.Linear(24, 2)
        self.frequency = nn.Linear(24, 1)
        self.automatic_optimization = False

    def features(self, waves: Tensor) -> Tensor:
        """Compute the features of both tasks; each block saves only its input."""
        hidden = self.first(waves)
        for block in self.trunk:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=True)
        return hidden

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        """Run a forward and a backward pass for each task, then one step."""
        waves, kinds, frequencies = batch
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        kind_loss = functional.cross_entropy(self.kind(self.features(waves)), kinds)
        self.manual_backward(kind_loss)
        frequency_loss = functional.mse_loss(self.frequency(self.features(waves)).squeeze(1), frequencies)
        self.manual_backward(frequency_loss)
        optimizer.step()
        losses = {"kind loss": kind_loss, "frequency loss": frequency_loss}
        self.log_dict(losses, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(waves))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def waves(samples: int = 390) -> TensorDataset:
    """Generate sine and square waves with noise, in float64."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    frequencies = 1 + 2 * torch.rand(samples, **options)
    phases = 6.3 * torch.rand(samples, 1, **options)
    kinds = torch.randint(2, (samples,), generator=generator)
    sines = torch.sin(phases + frequencies[:, None] * torch.linspace(0, 6.3, 32, dtype=torch.float64))
    signal = torch.where(kinds[:, None] == 1, sines.sign(), sines)
    return TensorDataset(signal + 0.1 * torch.randn(samples, 32, **options), kinds, frequencies - 2)


def train(strategy: str, devices: int) -> tuple[TwoTasks, pl.Trainer]:
    """Train for five epochs from the same start; the last batch of each is half as large."""
    pl.seed_everything(0, verbose=False)
    module = TwoTasks()
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, precision="64-true", max_epochs=5,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = waves()
    # The single process has to see the samples in the order in which Lightning gives them to the two ranks.
    sampler = DistributedSampler(data, num_replicas=1, rank=0) if devices == 1 else None
    trainer.fit(module, DataLoader(data, batch_size=BATCH // devices, sampler=sampler, shuffle=sampler is None))
    return module, trainer


def flat(module: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def main() -> None:
    """Train on two ranks; Lightning runs this file again for the second rank."""
    torch.set_num_threads(1)
    together, trainer = train("ddp_checkpoint", devices=2)
    own = flat(together)
    by_rank = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(by_rank, own)
    dist.barrier()  # torch 2.6 may hang where a group is destroyed right after a collective on tensors
    dist.destroy_process_group()
    if not trainer.is_global_zero:
        return
    alone, alone_trainer = train("auto", devices=1)
    for name, run in (("one process", alone_trainer), ("two ranks", trainer)):
        print(f"{name}: {', '.join(f'{key} {float(value):.6f}' for key, value in run.callback_metrics.items())}")
    between_ranks = float((by_rank[0] - by_rank[1]).abs().max())
    to_one_process = float((flat(together) - flat(alone)).abs().max())
    print(f"largest difference of a parameter after {trainer.global_step} steps:")
    print(f"    between the ranks {between_ranks}, to one process {to_one_process:.1e}")
    if between_ranks != 0 or to_one_process > 1e-9:
        raise SystemExit("the runs differ")


if __name__ == "__main__":
    main()

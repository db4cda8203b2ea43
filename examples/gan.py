"""A generative adversarial network on two ranks: manual optimization, two optimizers, no flags.

Run it with `python examples/gan.py`. Each loss is for one of the two networks. torch's `DistributedDataParallel` needs
`find_unused_parameters` for that, and searches the graph in every step; `ddp_checkpoint` needs no flag. The noise is
part of the data, so that one process has the same noise.
"""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_ddp_ext  # noqa: F401  registers "ddp_checkpoint"

BATCH = 64  # samples of a step, on all ranks together


class GAN(pl.LightningModule):
    """Learns to draw points from a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Let the discriminator learn, then the generator."""
        real, noise = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()  # type: ignore[misc, union-attr]

        fake = self.generator(noise)
        discriminator_loss = (
            functional.softplus(-self.discriminator(real)) + functional.softplus(self.discriminator(fake.detach()))
        ).mean()
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()

        generator_loss = functional.softplus(-self.discriminator(fake)).mean()
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)  # also computes gradients of the discriminator, which are not used
        generator_optimizer.step()

        losses = {"discriminator": discriminator_loss, "generator": generator_loss}
        self.log_dict(losses, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(real))

    def configure_optimizers(self) -> Any:
        """Return an optimizer for each network."""
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(network.parameters(), lr=2e-3, betas=(0.5, 0.9)) for network in networks]


class PrintLosses(pl.Callback):
    """Prints the mean losses of an epoch, on rank 0."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print them."""
        losses = ", ".join(f"{key} {float(value):.6f}" for key, value in trainer.callback_metrics.items())
        pl_module.print(
            f"{trainer.world_size} rank{'s' * (trainer.world_size > 1)}, epoch {trainer.current_epoch}: {losses}"
        )


def ring(samples: int = 1000) -> TensorDataset:
    """Generate points near a circle, and noise for as many others; in float64."""
    generator = torch.Generator().manual_seed(0)
    angles = 2 * torch.pi * torch.rand(samples, generator=generator, dtype=torch.float64)
    points = torch.stack([angles.cos(), angles.sin()], dim=1)
    points += 0.05 * torch.randn(points.shape, generator=generator, dtype=torch.float64)
    return TensorDataset(points, torch.randn(samples, 4, generator=generator, dtype=torch.float64))


def train(strategy: str, devices: int) -> tuple[GAN, pl.Trainer]:
    """Train for four epochs from the same start; the last batch of each is smaller."""
    pl.seed_everything(0, verbose=False)
    module = GAN()
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, precision="64-true", max_epochs=4,
        callbacks=[PrintLosses()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data = ring()
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
    alone, _ = train("auto", devices=1)
    between_ranks = float((by_rank[0] - by_rank[1]).abs().max())
    to_one_process = float((flat(together) - flat(alone)).abs().max())
    print(f"largest difference of a parameter after {trainer.global_step} steps of the two optimizers:")
    print(f"    between the ranks {between_ranks}, to one process {to_one_process:.1e}")
    if between_ranks != 0 or to_one_process > 1e-9:
        raise SystemExit("the runs differ")


if __name__ == "__main__":
    main()

"""An ordinary LightningModule, trained on one device and on two replicas: the same gradients, the same network.

Run it with `python examples/own_module.py`.
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_ext  # noqa: F401  registers "balanced_dp"


class TwoMoons(pl.LightningModule):
    """An ordinary LightningModule, independent of the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Compute the cross-entropy of a batch (points, labels)."""
        points, labels = batch
        logits = self.network(points)
        loss = functional.cross_entropy(logits, labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("accuracy", (logits.argmax(1) == labels).float().mean(), on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def two_moons(samples: int = 500) -> TensorDataset:
    """Generate two interleaved half circles, in float64."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.rand(samples, generator=generator, dtype=torch.float64) * torch.pi
    labels = torch.randint(0, 2, (samples,), generator=generator)
    side = 1.0 - 2.0 * labels
    points = torch.stack([side * angle.cos() + labels, side * angle.sin() + labels / 2], dim=1)
    return TensorDataset(points + 0.1 * torch.randn(points.shape, generator=generator, dtype=torch.float64), labels)


def train(strategy: str, devices: int) -> tuple[TwoMoons, pl.Trainer]:
    """Train for ten epochs from the same start; the last batch of each has 20 samples instead of 32."""
    pl.seed_everything(0, verbose=False)
    module = TwoMoons()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        precision="64-true",
        max_epochs=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(two_moons(), batch_size=32, shuffle=True))
    return module, trainer


if __name__ == "__main__":
    single, single_trainer = train("auto", devices=1)
    parallel, parallel_trainer = train("balanced_dp", devices=2)
    with torch.no_grad():
        pairs = zip(single.parameters(), parallel.parameters(), strict=True)
        difference = max(float((one - two).abs().max()) for one, two in pairs)
    for name, trainer in (("one device", single_trainer), ("two replicas", parallel_trainer)):
        values = {key: f"{float(value):.6f}" for key, value in trainer.callback_metrics.items()}
        print(f"{name}: {values}")
    print(f"largest difference of a parameter after {parallel_trainer.global_step} steps: {difference:.1e}")
    if difference > 1e-9:
        raise SystemExit("the two runs differ")

"""Training one module in several ways and comparing what reaches the optimizer."""

from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

FEATURES, CLASSES = 5, 3


class Classifier(LightningModule):
    """A small network with logging and a metric; batches are (features, labels)."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.network = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        logits = self.network(features)
        loss = functional.cross_entropy(logits, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=1e-2)


@dataclass
class GradientRecorder(Callback):
    """Keeps the gradient after every backward pass and before every optimizer step, flat."""

    after_backward: list[Tensor] = field(default_factory=list)
    before_step: list[Tensor] = field(default_factory=list)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.after_backward.append(flat_gradient(pl_module))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.before_step.append(flat_gradient(pl_module))

    @property
    def state_key(self) -> str:
        return type(self).__qualname__


def flat_gradient(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def dataset(samples: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(samples, FEATURES, dtype=dtype, generator=generator)
    return TensorDataset(features, torch.randint(0, CLASSES, (samples,), generator=generator))


@dataclass
class Trained:
    module: LightningModule
    trainer: Trainer
    gradients: GradientRecorder

    @property
    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.module.parameters()]


def quiet_trainer(strategy: Any, devices: int, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=strategy, devices=devices, **{**defaults, **options})


def train(
    module: LightningModule, strategy: Any = "auto", devices: int = 1, *, loader: Any = None, **options: Any
) -> Trained:
    """Fit in float64 unless told otherwise; the default loader ends with a partial batch of 3."""
    recorder = GradientRecorder()
    callbacks = [recorder, *options.pop("callbacks", [])]
    trainer = quiet_trainer(
        strategy, devices, **{"max_epochs": 3, "precision": "64-true", "callbacks": callbacks, **options}
    )
    trainer.fit(module, loader if loader is not None else DataLoader(dataset(27), batch_size=8))
    return Trained(module, trainer, recorder)


def relative_difference(tensors: list[Tensor], references: list[Tensor]) -> float:
    """Largest difference of a tensor to its reference, relative to the reference's norm."""
    assert len(tensors) == len(references) > 0
    ratios = [
        (tensor - reference).detach().norm() / reference.detach().norm().clamp_min(1e-30)
        for tensor, reference in zip(tensors, references, strict=True)
    ]
    return float(torch.stack(ratios).max())  # unlike Python's max, this is nan if any of them is


def seeded(build: Any) -> LightningModule:
    torch.manual_seed(11)
    return build()

"""Training one module in several ways, and comparing the gradients that reach the optimizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities import registry
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_ddp_ext import BalancedDataParallelStrategy
from tests.support import devices as test_devices

# For each Trainer, Lightning reads the metadata of all installed packages, which takes longer than a step of a test.
registry.entry_points = cache(registry.entry_points)

FEATURES, CLASSES = 5, 3
SPLITS: list[tuple[list[int] | None, int]] = [
    (None, 1),
    ([0, 8], 2),
    ([2, 6], 2),
    ([7, 1], 2),
    ([2, 3, 3], 3),
    (None, 2),
    (None, 4),
]
T = TypeVar("T")


def balanced(split: Sequence[float] | None = None, **options: Any) -> BalancedDataParallelStrategy:
    return BalancedDataParallelStrategy(split=split, **options)


def both_ways(run: Callable[..., T], **options: Any) -> tuple[T, T]:
    """Run on one device, then on two replicas that share batches 2 to 6 unless the options say otherwise."""
    strategy = balanced(**(options or {"split": [2, 6]}))
    return run(strategy="auto", devices=1), run(strategy=strategy, devices=2)


class Classifier(LightningModule):
    """A small network with logging and a metric; batches are (features, labels)."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> None:
        super().__init__()
        self.make_optimizer = partial(optimizer, **{"lr": 1e-2, **options})
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
        return self.make_optimizer(self.parameters())


def normalised_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, CLASSES))


class Evaluated(Classifier):
    """Also validates, tests and predicts, on one loader or several."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam) -> None:
        super().__init__(optimizer)
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self.network(batch[0])
        self.val_accuracy(logits, batch[1])
        self.log("val_accuracy", self.val_accuracy, on_epoch=True)
        self.log("val_loss", functional.cross_entropy(logits, batch[1]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"logits": self.network(batch[0]), "index": batch[1].tolist()}


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


class CachesMask(Classifier):
    """Keeps a mask for the size of the last batch, and makes another one for batches of another size."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.last_size = -1
        self.register_buffer("mask", None, persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = batch[0]
        if len(features) != self.last_size:
            self.mask = torch.ones(1, FEATURES, dtype=features.dtype, device=features.device).expand(len(features), -1)
            self.last_size = len(features)
        return super().training_step((features * self.mask.view(features.shape), *batch[1:]), batch_idx)


class StepValues(Callback):
    """Keeps everything that has been logged after every training step."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def flat_gradient(module: nn.Module) -> Tensor:
    gradients = [p.grad.flatten().cpu() for p in module.parameters() if p.grad is not None]
    return torch.cat([torch.empty(0), *gradients])


def dataset(samples: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(samples, FEATURES, dtype=dtype, generator=generator)
    return TensorDataset(features, torch.randint(0, CLASSES, (samples,), generator=generator))


def batches(samples: int = 27, batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(samples), batch_size=batch_size, **options)


@dataclass
class Trained:
    module: LightningModule
    trainer: Trainer
    gradients: GradientRecorder

    @property
    def parameters(self) -> list[Tensor]:
        return [p.detach().cpu().clone() for p in self.module.parameters()]


def assert_same_training(parallel: Trained, single: Trained, tolerance: float = 1e-12) -> None:
    """Compare every gradient, the parameters in the end, the number of steps and everything logged."""
    tolerance = test_devices.tolerance(tolerance)
    assert parallel.trainer.global_step == single.trainer.global_step > 0
    for name in ("after_backward", "before_step"):
        found, expected = getattr(parallel.gradients, name), getattr(single.gradients, name)
        assert relative_difference(found, expected) < tolerance, name
    assert relative_difference(parallel.parameters, single.parameters) < tolerance
    metrics = single.trainer.callback_metrics
    assert parallel.trainer.callback_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        torch.testing.assert_close(parallel.trainer.callback_metrics[name], value, rtol=1e-9, atol=1e-9)


def quiet_trainer(strategy: Any = "auto", devices: int = 1, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        **test_devices.trainer_options(strategy, devices),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**defaults, **options})


def train(
    module: LightningModule,
    strategy: Any = "auto",
    devices: int = 1,
    *,
    loader: Any = None,
    val_loader: Any = None,
    **options: Any,
) -> Trained:
    """Fit in float64 by default; the default loader ends with a partial batch of 3."""
    recorder = GradientRecorder()
    callbacks = [recorder, *options.pop("callbacks", [])]
    trainer = quiet_trainer(
        strategy, devices, **{"max_epochs": 3, "precision": "64-true", "callbacks": callbacks, **options}
    )
    trainer.fit(module, loader if loader is not None else batches(), val_loader)
    return Trained(module, trainer, recorder)


def compare(
    build: Callable[[], LightningModule],
    options: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
    **strategy_options: Any,
) -> tuple[Trained, Trained]:
    """Train on one device and on two replicas, assert that the training is the same, and return both.

    Options of `train` come from a function if both runs need separate objects, such as callbacks.
    """
    make = options if callable(options) else lambda: options or {}
    single, parallel = both_ways(lambda **way: train(seeded(build), **way, **make()), **strategy_options)
    assert_same_training(parallel, single)
    return single, parallel


def log_values(
    build: Callable[[], LightningModule], strategy: Any = "auto", devices: int = 1, samples: int = 27
) -> tuple[LightningModule, list[dict[str, float]], dict[str, Tensor]]:
    """Train two epochs; return the module, the values after every step, and the tensors that are logged at the end."""
    steps = StepValues()
    trainer = quiet_trainer(strategy, devices, precision="64-true", max_epochs=2, callbacks=[steps])
    module = seeded(build)
    trainer.fit(module, batches(samples))
    return module, steps.values, dict(trainer.callback_metrics)


def relative_difference(tensors: list[Tensor], references: list[Tensor]) -> float:
    """Largest difference of a tensor to its reference, relative to the reference's norm."""
    assert len(tensors) == len(references) > 0
    ratios = [
        (tensor - reference).norm() / reference.norm().clamp_min(1e-30)
        for tensor, reference in zip(map(_on_cpu, tensors), map(_on_cpu, references), strict=True)
    ]
    return float(torch.stack(ratios).max())  # unlike Python's max, this is nan if any of them is


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def seeded(build: Any) -> LightningModule:
    torch.manual_seed(11)
    return build()

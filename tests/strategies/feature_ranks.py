"""Training on several ranks with features of Lightning; kept apart because every rank imports it."""

import os
import traceback
import warnings
from typing import Any

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook

from lightning_ddp_ext import DDPCheckpointStrategy
from lightning_ddp_ext.callbacks import ReplicaConsistency
from tests.strategies.ddp_modules import CLASSES, FEATURES, Classifier, Noisy
from tests.strategies.ddp_ranks import batches_of, digest_of, make_batch, quiet_trainer


class Normalised(Classifier):
    """Has buffers, dropout and validation; a part of it is frozen in the second epoch."""

    def __init__(self) -> None:
        super().__init__(torch.optim.AdamW)
        self.network = nn.Sequential(
            nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, CLASSES)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_start(self) -> None:
        self.network[0].requires_grad_(self.current_epoch != 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


class Drawing(Normalised):
    """Ranks draw different amounts of random numbers; the optimizer adds noise, and so does a hook on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.network[0].weight
        weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.add_(torch.randn_like(weight), alpha=0.1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.rand(int(os.environ["RANK"]))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return Noisy(self.parameters(), lr=0.1)


class DifferentSize(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.network[2] = nn.Linear(7, CLASSES + int(os.environ["RANK"]))


def fit_features(folder: str) -> dict[str, tuple[str, str]]:
    """Train with features of Lightning, one after another; returns a digest and an error for each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    loader = torch.utils.data.DataLoader(batches_of([[4, 5, 6, 3]] * 2, rank), batch_size=None)
    found = {}
    for name, options in features(folder).items():
        seed_everything(0, verbose=False)
        module = options.pop("module", Normalised)()
        options = {"strategy": "ddp_checkpoint", "precision": "64-true", "max_epochs": 3, **options}
        resume = options.pop("resume", False)
        trainer = quiet_trainer(**options)
        try:
            trainer.fit(module, loader, loader)
            if resume:
                path = trainer.checkpoint_callback.last_model_path
                trainer = quiet_trainer(**{**options, "max_epochs": 5})
                trainer.fit(module, loader, loader, ckpt_path=path)
            found[name] = digest_of(module, trainer), ""
        except Exception:
            found[name] = "", traceback.format_exc()
    return found


def fit_scaled(sizes: list[int]) -> tuple[str, float]:
    """Train with a gradient scaler on batches of which those of one sample count nothing.

    Returns:
        A digest, and the scale at the end.
    """
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    made = [make_batch(int(os.environ["RANK"]), size, size) for size in sizes]
    batches = [(features.float(), labels) for features, labels in made]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
    trainer = quiet_trainer(
        strategy=DDPCheckpointStrategy(weight_by=lambda batch: len(batch[1]) - 1),
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        max_epochs=2,
    )
    module = Classifier(torch.optim.Adam)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return digest_of(module, trainer), scaler.get_scale()


def log_ones() -> dict[str, float]:
    """Log means of ones, on ranks with batches of 1 and 2 samples."""

    class Logging(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("training", 1.0, sync_dist=True, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validation", 1.0, sync_dist=True)

    loader = torch.utils.data.DataLoader(batches_of([[1], [2]], int(os.environ["RANK"])), batch_size=None)
    trainer = quiet_trainer(strategy="ddp_checkpoint", precision="64-true", max_epochs=1)
    trainer.fit(Logging(), loader, loader)
    return {name: float(trainer.callback_metrics[name]) for name in ("training", "validation")}


NAMES = (
    "plain",
    "early stopping",
    "checkpoints and resuming",
    "stochastic weight averaging",
    "moving averages",
    "accumulation schedule",
    "bf16-mixed",
    "bf16-true",
    "float32",
    "anomaly detection",
    "profiler",
    "consistency",
    "overfitting",
    "post-local SGD",
    "compressed gradients",
    "recomputed layers",
    "an optimizer that draws",
    "different modules",
    "different arguments",
)


def features(folder: str) -> dict[str, dict[str, Any]]:
    return {
        "plain": {},
        "early stopping": {"callbacks": [EarlyStopping("val_loss")]},
        "checkpoints and resuming": {
            "callbacks": [ModelCheckpoint(folder, save_last=True)],
            "enable_checkpointing": True,
            "resume": True,
        },
        "stochastic weight averaging": {"callbacks": [StochasticWeightAveraging(1e-2, swa_epoch_start=1)]},
        "moving averages": {"callbacks": [EMAWeightAveraging()]},
        "accumulation schedule": {"callbacks": [GradientAccumulationScheduler({0: 2, 1: 1, 2: 3})]},
        "bf16-mixed": {"precision": "bf16-mixed"},
        "bf16-true": {"precision": "bf16-true"},
        "float32": {"precision": "32-true"},
        "anomaly detection": {"detect_anomaly": True},
        "profiler": {"profiler": "simple"},
        "consistency": {"callbacks": [ReplicaConsistency(every_n_steps=1)]},
        "overfitting": {"overfit_batches": 2},
        "post-local SGD": {
            "strategy": DDPCheckpointStrategy(
                ddp_comm_state=post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=100),
                ddp_comm_hook=post_localSGD_hook.post_localSGD_hook,
                model_averaging_period=2,
            )
        },
        "compressed gradients": {
            "strategy": DDPCheckpointStrategy(
                ddp_comm_hook=default_hooks.allreduce_hook, ddp_comm_wrapper=default_hooks.fp16_compress_wrapper
            )
        },
        "recomputed layers": {"strategy": DDPCheckpointStrategy(activation_checkpointing="torch.nn.Linear")},
        "an optimizer that draws": {"module": Drawing},
        "different modules": {"module": DifferentSize},
        "different arguments": {"strategy": DDPCheckpointStrategy(bucket_cap_mb=5 + int(os.environ["RANK"]))},
    }

"""Features of Lightning under `ddp_checkpoint`: they work and leave ranks identical. One launch for all."""

import os
import traceback
import warnings
from typing import Any

import pytest
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
from tests.support.devices import accelerator
from tests.support.processes import run_processes


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
        "different arguments": {"strategy": DDPCheckpointStrategy(bucket_cap_mb=5 + int(os.environ.get("RANK", 0)))},
    }


def fit_features(folder: str) -> dict[str, tuple[str, str]]:
    """Train with each feature; returns a digest and an error for each."""
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
    """Train with a gradient scaler; batches of one sample have no weight. Returns a digest and the final scale."""
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    made = [make_batch(int(os.environ["RANK"]), size, size) for size in sizes]
    batches = [(features.float(), labels) for features, labels in made]
    scaler = torch.amp.GradScaler(accelerator(), init_scale=2.0, growth_interval=1)
    trainer = quiet_trainer(
        strategy=DDPCheckpointStrategy(weight_by=lambda batch: len(batch[1]) - 1),
        plugins=[MixedPrecision("16-mixed", accelerator(), scaler)],
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


def run(folder: str) -> Any:
    scaled = [fit_scaled(sizes) for sizes in ([3, 1, 4], [3, 4], [3, 2, 4])]
    return scaled, log_ones(), fit_features(folder)


MISMATCHES = {
    "different modules": "`network.2.weight` is",
    "different arguments": "argument `bucket_cap_mb` is 5 on rank 0 but 6 on rank 1",
}
NAMES = [name for name in features("") if name not in MISMATCHES]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_processes(run, 2, str(tmp_path_factory.mktemp("checkpoints")), timeout=200)


@pytest.mark.parametrize("name", NAMES)
def test_a_feature_works_and_leaves_ranks_identical(found, name):
    (first, first_error), (second, second_error) = (of_rank[2][name] for of_rank in found)
    assert not first_error + second_error
    assert first == second != ""


def test_the_mean_over_an_odd_number_of_samples_is_right(found):
    """Lightning takes the mean of the ranks' numbers of samples, and would truncate the mean of 1 and 2."""
    assert [of_rank[1] for of_rank in found] == [{"training": 1.0, "validation": 1.0}] * 2


def test_a_batch_without_weight_on_all_ranks_is_skipped_under_a_gradient_scaler(found):
    """torch's scaler stops at an optimizer without any gradient."""
    (with_it, without, other), second = (of_rank[0] for of_rank in found)
    assert [with_it, without] == second[:2]
    assert with_it == without != other


def test_recomputed_layers_change_nothing(found):
    assert found[0][2]["recomputed layers"][0] == found[0][2]["plain"][0]


@pytest.mark.parametrize(("name", "message"), MISMATCHES.items())
def test_different_setups_of_ranks_are_refused_before_the_first_step(found, name, message):
    for of_rank in found:
        assert "ReplicaMismatchError: ranks are not set up alike" in of_rank[2][name][1]
        assert message in of_rank[2][name][1]

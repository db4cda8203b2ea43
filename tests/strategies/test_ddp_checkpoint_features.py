"""Features of Lightning under `ddp_checkpoint` work and leave two ranks identical; different set-ups are refused."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPCheckpointStrategy
from tests.strategies.toolkit import (
    CLASSES,
    FEATURES,
    RANK,
    Classifier,
    Noisy,
    batches_of_ranks,
    fit,
    run_on_ranks,
    values_of,
)


class Normalised(Classifier):
    """Has buffers, dropout and validation; a part of it is frozen in the second epoch."""

    def __init__(self) -> None:
        super().__init__(torch.optim.AdamW)
        self.network = nn.Sequential(
            nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, CLASSES)
        )

    def on_train_epoch_start(self) -> None:
        self.network[0].requires_grad_(self.current_epoch != 1)


class Drawing(Normalised):
    """Ranks draw different amounts of random numbers; the optimizer adds noise, and so does a hook on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.make_optimizer = partial(Noisy, lr=0.1)
        weight = self.network[0].weight
        weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.add_(torch.randn_like(weight), alpha=0.1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(RANK)
        return super().training_step(batch, batch_idx)


class DifferentSize(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.network[2] = nn.Linear(7, CLASSES + RANK)


def train(
    folder: str,
    make: Callable[[], dict[str, Any]] = dict,
    module: Callable[[], Any] = Normalised,
) -> str:
    """Train with these options of the Trainer; returns the digest of this rank."""
    data = DataLoader(batches_of_ranks([[4, 5, 6, 3]] * 2)[RANK], batch_size=None)
    options = {"strategy": "ddp_checkpoint", "max_epochs": 3, **make()}
    return fit(module(), data, data, **options)[1].digests[-1]


def post_local_sgd() -> dict[str, Any]:
    state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=100)
    hook = post_localSGD_hook.post_localSGD_hook
    return {"strategy": DDPCheckpointStrategy(ddp_comm_state=state, ddp_comm_hook=hook, model_averaging_period=2)}


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "early stopping": lambda: {"callbacks": [EarlyStopping("val_loss")]},
    "stochastic weight averaging": lambda: {"callbacks": [StochasticWeightAveraging(1e-2, swa_epoch_start=1)]},
    "moving averages": lambda: {"callbacks": [EMAWeightAveraging()]},
    "accumulation schedule": lambda: {"callbacks": [GradientAccumulationScheduler({0: 2, 1: 1, 2: 3})]},
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "bf16-true": lambda: {"precision": "bf16-true"},
    "post-local SGD": post_local_sgd,
    "compressed gradients": lambda: {
        "strategy": DDPCheckpointStrategy(
            ddp_comm_hook=default_hooks.allreduce_hook, ddp_comm_wrapper=default_hooks.fp16_compress_wrapper
        )
    },
    "recomputed layers": lambda: {"strategy": DDPCheckpointStrategy(activation_checkpointing="torch.nn.Linear")},
    "different arguments": lambda: {"strategy": DDPCheckpointStrategy(bucket_cap_mb=5 + RANK)},
}


def train_with(name: str, folder: str) -> str:
    return train(folder, OPTIONS[name])


class FailAt(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.global_rank == 1:
            raise ArithmeticError("boom")


def fail_and_save(folder: str) -> dict[str, Any]:
    """Fail on one rank while every rank saves on exceptions."""
    handler = signal.getsignal(signal.SIGTERM)
    callbacks = [FailAt(), ModelCheckpoint(f"{folder}/failure", "{step}", save_on_exception=True)]
    with pytest.raises(Exception) as error:  # noqa: PT011  # each rank has its own
        train(folder, lambda: {"callbacks": callbacks, "enable_checkpointing": True})
    files = [] if RANK else sorted(Path(folder, "failure").iterdir())
    steps = [torch.load(file, weights_only=True)["global_step"] for file in files]
    return {"error": error.typename, "is_restored": signal.getsignal(signal.SIGTERM) is handler, "steps": steps}


CASES = {
    **{name: partial(train_with, name) for name in OPTIONS},
    "an optimizer that draws": partial(train, module=Drawing),
    "different modules": partial(train, module=DifferentSize),
    "failure": fail_and_save,
}
MISMATCHES = {
    "different modules": "`network.2.weight` is",
    "different arguments": "argument `bucket_cap_mb` is 5 on rank 0 but 6 on rank 1",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_on_ranks(2, CASES, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("name", [name for name in CASES if name not in (*MISMATCHES, "failure")])
def test_a_feature_works_and_leaves_ranks_identical(found, name):
    first, second = values_of(found, name)
    assert first == second


def test_recomputed_layers_change_nothing(found):
    assert values_of(found, "recomputed layers") == values_of(found, "plain")


def test_different_setups_of_ranks_are_refused_before_the_first_step(found):
    for name, message in MISMATCHES.items():
        for error in found[name]:
            assert "ReplicaMismatchError: ranks are not set up alike" in error
            assert message in error


def test_a_checkpoint_is_saved_when_a_rank_fails_and_signal_handlers_are_restored(found):
    first, second = values_of(found, "failure")
    assert first == {"error": "OtherRankError", "is_restored": True, "steps": [2]}
    assert second == {"error": "ArithmeticError", "is_restored": True, "steps": []}

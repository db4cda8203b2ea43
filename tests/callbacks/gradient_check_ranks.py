"""What the ranks of the tests of `GradientCheck` run; one launch goes through all cases."""

import os
import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy
from lightning_ddp_ext.callbacks import GradientCheck
from lightning_ddp_ext.data.random_states import capture_random_states
from lightning_ddp_ext.parallel.consistency.training_state import name_training_state
from tests.callbacks.gradient_check_modules import CASES, Case, Drawing, IgnoreIndex, Plain, loader
from tests.parity import CLASSES, FEATURES, quiet_trainer

STRATEGIES = {"ddp_checkpoint": DDPCheckpointStrategy, "ddp_join": DDPJoinStrategy}


class Communicating(Plain):
    def loss(self, batch: Any) -> Tensor:
        dist.all_reduce(torch.ones(1))
        return super().loss(batch)


class Locked(Plain):
    """Cannot be copied on rank 1."""

    def setup(self, stage: str) -> None:
        if self.global_rank == 1:
            self.lock = threading.Lock()


class ByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))


class Texts(Plain):
    """Rank 1 has longer ones."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.last(self.first(batch["tokens"].mean(1))).square().mean()

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        return DataLoader([{"tokens": torch.ones(3 + rank, FEATURES)}] * 4, batch_size=2)


class Streams(IgnoreIndex):
    """Rank 1 has fewer batches."""

    def train_dataloader(self) -> Any:
        number = [12, 4][self.trainer.global_rank]
        generator = torch.Generator().manual_seed(number)
        features = torch.randn(number, FEATURES, generator=generator)
        labels = torch.randint(CLASSES, (number,), generator=generator)
        return DataLoader(list(zip(features, labels, strict=True)), batch_size=4)


def fit(module: LightningModule, callbacks: list[Callback], strategy: Any, data: Any = None, **options: Any) -> Any:
    trainer = quiet_trainer(
        strategy,
        int(os.environ["WORLD_SIZE"]),
        callbacks=callbacks,
        use_distributed_sampler=False,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, data)
    return trainer


def check(module: LightningModule, strategy: Any, data: Any = None, batches: int = 1, **options: Any) -> dict[str, Any]:
    callback = GradientCheck(batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(module, [callback], strategy, data, **options)
    return {
        "records": callback.records,
        "reason": callback.reason,
        "steps": trainer.global_step,
        "warnings": [str(one.message) for one in caught if "GradientCheck" in str(one.message)],
    }


def check_case(case: Case, strategy: str, rank: int) -> dict[str, Any]:
    made = STRATEGIES[strategy](process_group_backend="gloo", weight_by=case.weight_by)
    return check(case.build(), made, loader(case, rank), **case.options)


class DrawingFromStreams(Drawing, Streams):
    pass


class DrawsNumbers(Callback):
    """Changes the training that follows."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        torch.rand(1)


def state_of(module: Plain, trainer: Trainer) -> dict[str, Tensor]:
    """Return everything that a check could change, each value copied."""
    state = name_training_state(module, trainer.optimizers, buffers=True)
    logged = {f"logged {name}": value for name, value in trainer.callback_metrics.items()}
    more = {"random": capture_random_states(), "steps": torch.tensor([module.steps, trainer.global_step])}
    return {name: torch.as_tensor(value).clone() for name, value in {**state, **logged, **more}.items()}


def state_after(*callbacks: Callback) -> dict[str, Tensor]:
    """Train for two epochs, into the uneven phase of each."""
    module = DrawingFromStreams()
    trainer = fit(module, [*callbacks], DDPJoinStrategy(process_group_backend="gloo"), max_epochs=2)
    return state_of(module, trainer)


def run(cases: list[tuple[str, str]]) -> dict[Any, Any]:
    rank = int(os.environ["RANK"])
    found: dict[Any, Any] = {(name, strategy): check_case(CASES[name], strategy, rank) for name, strategy in cases}
    even = loader(CASES["mean in float32"], rank)
    for build, data, batches in [
        (Communicating, even, 1), (Locked, even, 1), (ByHand, even, 1), (Texts, None, 1), (Streams, None, 3),
    ]:  # fmt: skip
        found[build.__name__] = check(build(), DDPJoinStrategy(process_group_backend="gloo"), data, batches)
    found["states"] = [state_after(), state_after(GradientCheck(batches=2)), state_after(DrawsNumbers())]
    return found

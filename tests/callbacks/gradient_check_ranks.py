"""What the ranks of the tests of `GradientCheck` run; one launch goes through all cases."""

import os
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy
from lightning_ddp_ext.callbacks import GradientCheck
from lightning_ddp_ext.consistency.replica_differences import name_training_state
from lightning_ddp_ext.resume.rng_state import capture_rng_state
from tests.callbacks.gradient_check_modules import (
    CASES,
    SIZES,
    Case,
    Drawing,
    IgnoreIndex,
    Plain,
    loader,
    part,
    samples,
)
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


class TimeFirst(Plain):
    """The loader draws the samples, which are in the second dimension of its batches."""

    def __init__(self, sizes: Sequence[int] = (4, 4)) -> None:
        super().__init__()
        self.sizes = sizes

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        number = self.sizes[rank]
        rows = torch.randn(number, 6, FEATURES, generator=torch.Generator().manual_seed(rank))
        return DataLoader(TensorDataset(rows), number, collate_fn=lambda rows: torch.stack([row for (row,) in rows], 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.last(self.first(batch[-1]).tanh()).square().mean()  # of the last time


class MadeByTheDataset(Plain):
    """Each entry of the dataset is a batch, which `collate_fn` converts."""

    def train_dataloader(self) -> Any:
        rows = part(samples(double=False), self.trainer.global_rank).tensors
        return DataLoader([rows], batch_size=1, collate_fn=lambda batches: [*batches[0]])


class Repeating(Plain):
    """A hook repeats the samples, once more on rank 1: samples weigh by another number than that of the loader."""

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        return DataLoader([{"rows": part(samples(double=False), rank).tensors[0]}], batch_size=None)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch["rows"] = batch["rows"].repeat(1 + self.trainer.global_rank, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.last(self.first(batch["rows"]).tanh()).square().mean()


class Skipping(Streams):
    """Returns None in the first batch of rank 1, and in the second one of all ranks."""

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        rows = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(rank))
        first = torch.tensor([0.0, 1.0, 2.0]).repeat_interleave(4) + 3 * rank
        return DataLoader(TensorDataset(torch.cat([first[:, None], rows[:, 1:]], 1)), batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first = int(batch[0][0, 0])
        return None if first in (1, 3, 4) else self.last(self.first(batch[0]).tanh()).square().mean()


class Weights(Callback):
    """The weight of each batch in the gradient."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.seen.append(trainer.strategy.batch_weight)


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
    callback, weights = GradientCheck(batches), Weights()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(module, [callback, weights], strategy, data, **options)
    return {
        "records": callback.records,
        "reason": callback.reason,
        "steps": trainer.global_step,
        "weights": weights.seen,
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
    more = {
        "random": torch.tensor([*repr(capture_rng_state()).encode()]),
        "steps": torch.tensor([module.steps, trainer.global_step]),
    }
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
        (TimeFirst, None, 1), (MadeByTheDataset, None, 1), (Repeating, None, 1), (Skipping, None, 2),
    ]:  # fmt: skip
        found[build.__name__] = check(build(), DDPJoinStrategy(process_group_backend="gloo"), data, batches)
    for weight_by in ("samples", "equal"):
        strategy = DDPJoinStrategy(process_group_backend="gloo", batch_dim=1, weight_by=weight_by)
        found["along `batch_dim`", weight_by] = check(TimeFirst(SIZES), strategy)
    found["states"] = [state_after(), state_after(GradientCheck(batches=2)), state_after(DrawsNumbers())]
    return found

"""A small task, trained under each strategy on the devices of the tests, and on one of them alone."""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy, DDPCheckpointStrategy, DDPJoinStrategy
from tests.strategies.ddp_ranks import KeepGradients, digest_of, quiet_trainer
from tests.support.processes import run_processes

STRATEGIES: dict[str, Callable[..., Any]] = {
    "balanced_dp": BalancedDataParallelStrategy,
    "ddp_checkpoint": DDPCheckpointStrategy,
    "ddp_join": DDPJoinStrategy,
}
RANKED = ("ddp_checkpoint", "ddp_join")
WIDTH = 16


class Regression(LightningModule):
    """Any network that predicts the second part of a batch from the first."""

    def __init__(self, network: Callable[[], nn.Module], optimizer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.make_optimizer = optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.network = network()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.network(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, WIDTH))


def rows(
    size: int, seed: int, shape: tuple[int, ...] = (WIDTH,), dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of the same shape."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(2, size, *shape, generator=generator, dtype=dtype)
    return inputs, targets


single_rows = partial(rows, dtype=torch.float32)


@dataclass(frozen=True)
class Task:
    """A training run; `sizes` are the samples of each rank's batches."""

    module: Callable[[], LightningModule]
    batch: Callable[[int, int], tuple[Tensor, Tensor]] = rows
    sizes: Sequence[Sequence[int]] = ((3, 5, 2), (6, 1, 4))
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    callback: Callable[[], Callback] | None = None  # whose `found` is returned
    plugins: Callable[[], list[Any]] | None = None

    def batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        return [self.batch(size, 100 * rank + number) for number, size in enumerate(self.sizes[rank])]

    def whole_batches(self) -> list[tuple[Tensor, ...]]:
        """Concatenate the batches of all ranks for each step."""
        by_rank = [self.batches(rank) for rank in range(len(self.sizes))]
        steps = max(map(len, by_rank))
        parts = [[batches[step] for batches in by_rank if step < len(batches)] for step in range(steps)]
        return [tuple(map(torch.cat, zip(*some, strict=True))) for some in parts]


@dataclass
class Ended:
    """The end of a run on a rank."""

    gradients: list[Tensor]
    parameters: Tensor
    digest: str
    backend: str = ""
    found: Any = None


def train_here(task: Task, batches: Sequence[Any], strategy: Any, count: int) -> Ended:
    """Train in this process, on one device or as one of `count` ranks."""
    seed_everything(0, verbose=False)
    module, gradients = task.module(), KeepGradients()
    own = None if task.callback is None else task.callback()
    options = {"precision": "64-true", "max_epochs": 1, "enable_progress_bar": False, **task.trainer}
    options["callbacks"] = [gradients, *([own] if own else [])]
    if task.plugins is not None:
        options |= {"plugins": task.plugins(), "precision": None}
    trainer = quiet_trainer(strategy, count, **options)
    backend: list[str] = []
    fitted = DataLoader(list(batches), batch_size=None)
    module.on_fit_start = lambda: backend.append(dist.get_backend() if dist.is_initialized() else "")
    trainer.fit(module, fitted)
    parameters = torch.cat([parameter.detach().flatten().cpu() for parameter in module.parameters()])
    return Ended(gradients.kept, parameters, digest_of(module, trainer), backend[0], getattr(own, "found", None))


def train_on_rank(name: str, task: Task) -> Ended:
    """Train as one of the ranks that `run_processes` has started."""
    warnings.simplefilter("ignore")
    batches = task.batches(int(os.environ["RANK"]))
    return train_here(task, batches, STRATEGIES[name](**task.strategy), int(os.environ["WORLD_SIZE"]))


def train(name: str, task: Task, timeout: float = 200.0) -> list[Ended]:
    """Train on as many replicas or ranks as the task has; returns the end of each process."""
    if name == "balanced_dp":
        strategy = BalancedDataParallelStrategy(**task.strategy)
        return [train_here(task, task.whole_batches(), strategy, len(task.sizes))]
    return run_processes(train_on_rank, len(task.sizes), name, task, timeout=timeout)


def train_alone(task: Task) -> Ended:
    return train_here(task, task.whole_batches(), "auto", 1)


def difference(found: Ended, expected: Ended) -> float:
    """Largest difference of a gradient or of the parameters, relative to their norm."""
    assert len(found.gradients) == len(expected.gradients) > 0
    pairs = [*zip(found.gradients, expected.gradients, strict=True), (found.parameters, expected.parameters)]
    return float(torch.stack([(one.double() - other).norm() / other.double().norm() for one, other in pairs]).max())

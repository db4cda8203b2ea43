"""A small task, trained under each strategy on the devices of the tests, and on one of them alone."""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy, BalancedDDPStrategy, DDPCheckpointStrategy, DDPJoinStrategy
from tests.strategies.toolkit import digest_of
from tests.support import training
from tests.support.processes import run_processes

STRATEGIES: dict[str, Callable[..., Any]] = {
    "balanced_dp": BalancedDataParallelStrategy,
    "balanced_ddp": BalancedDDPStrategy,
    "ddp_checkpoint": DDPCheckpointStrategy,
    "ddp_join": DDPJoinStrategy,
}
RANKED = ("balanced_ddp", "ddp_checkpoint", "ddp_join")
WIDTH = 16


class Regression(LightningModule):
    """Any network that predicts the second part of a batch from the first."""

    def __init__(self, network, optimizer=None):
        super().__init__()
        self.make_optimizer = optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.network = network()

    def training_step(self, batch, batch_idx):
        return (self.network(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


def plain():
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, WIDTH))


def rows(size, seed, shape=(WIDTH,), dtype=torch.float64):
    """Return inputs and targets of the same shape."""
    inputs, targets = torch.randn(2, size, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
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

    def batches(self, rank):
        return [self.batch(size, 100 * rank + number) for number, size in enumerate(self.sizes[rank])]

    def whole_batches(self):
        """Concatenate the batches of all ranks for each step."""
        steps = zip_longest(*(self.batches(rank) for rank in range(len(self.sizes))))
        return [tuple(map(torch.cat, zip(*filter(None, step), strict=True))) for step in steps]


@dataclass
class Ended:
    """The end of a run on a rank."""

    gradients: list[Tensor]
    parameters: Tensor
    digest: str
    backend: str = ""
    found: Any = None


def train_here(task, batches, strategy, count):
    """Train in this process, on one device or as one of `count` ranks."""
    seed_everything(0, verbose=False)
    module, own, backend = task.module(), task.callback and task.callback(), []
    module.on_fit_start = lambda: backend.append(dist.get_backend() if dist.is_initialized() else "")
    options = {"max_epochs": 1, "use_distributed_sampler": False, "callbacks": [own] if own else [], **task.trainer}
    if task.plugins is not None:
        options |= {"plugins": task.plugins(), "precision": None}
    trained = training.train(module, strategy, count, loader=DataLoader(list(batches), batch_size=None), **options)
    parameters = torch.cat([parameter.flatten() for parameter in trained.parameters])
    digest, found = digest_of(module, *trained.trainer.optimizers), getattr(own, "found", None)
    return Ended(trained.gradients.before_step, parameters, digest, backend[0], found)


def train_on_rank(name, task):
    """Train as one of the ranks that `run_processes` has started."""
    warnings.simplefilter("ignore")
    strategy = STRATEGIES[name](**task.strategy)
    batches = task.whole_batches() if strategy.shares_batches else task.batches(int(os.environ["RANK"]))
    return train_here(task, batches, strategy, int(os.environ["WORLD_SIZE"]))


def train(name, task, timeout=200.0):
    """Train on as many replicas or ranks as the task has; returns the end of each process."""
    if name == "balanced_dp":
        strategy = BalancedDataParallelStrategy(**task.strategy)
        return [train_here(task, task.whole_batches(), strategy, len(task.sizes))]
    return run_processes(train_on_rank, len(task.sizes), name, task, timeout=timeout)


def train_alone(task):
    return train_here(task, task.whole_batches(), "auto", 1)


def difference(found, expected):
    """Largest difference of a gradient or of the parameters, relative to their norm."""
    assert len(found.gradients) == len(expected.gradients) > 0
    pairs = [*zip(found.gradients, expected.gradients, strict=True), (found.parameters, expected.parameters)]
    return float(torch.stack([(one.double() - other).norm() / other.double().norm() for one, other in pairs]).max())

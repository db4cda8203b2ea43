"""Fits that stand still between their turns, on ranks that may use the package of any tree: it is imported late."""

import itertools
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from measuring.fitting import build, make_trainer
from measuring.models import CASES, load_samples
from measuring.orders import Orders
from measuring.scenarios import Mode

WARM_UP = 3  # steps after each rest that are not counted


class _Regression(pl.LightningModule):
    """The loss is the mean squared output; a slow rank computes it several times."""

    def __init__(self, network: nn.Module, times: int) -> None:
        super().__init__()
        self.network, self.times = network, times

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses = [self.network(batch).pow(2).mean() for _ in range(self.times)]
        return torch.stack(losses).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Turns(pl.Callback):
    """Reports the times of the steps of a turn, each from the end of the one before, and waits for another turn."""

    def __init__(self, orders: Orders, steps: int) -> None:
        self._orders, self._steps = orders, steps
        self._ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self._ends.append(time.perf_counter())
        if len(self._ends) > self._steps + WARM_UP:
            self._orders.reply([end - start for start, end in itertools.pairwise(self._ends)][WARM_UP:])
            self._steps = self._orders.wait()["steps"]
            self._ends.clear()


def fit(
    orders: Orders,
    *,
    steps: int,
    ranks: int,
    case: str,
    strategy: str,
    arguments: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    replicas: int = 1,
    threads: int = 1,
    mode: Mode = "none",
    slowness: Mapping[int, int] = MappingProxyType({}),
    skip: int = 0,
) -> None:
    """Fit until the process is killed; `skip` steps come before the first turn, and `slowness` is by rank, else 1.

    Further orders have only the `steps` of a turn.
    """
    import lightning_ddp_ext

    torch.set_num_threads(threads)
    chosen, made = CASES[case], strategy
    if arguments:
        made = (pl.strategies.DDPStrategy if strategy == "ddp" else lightning_ddp_ext.BalancedDDPStrategy)(**arguments)
    trainer = make_trainer(made, _Turns(orders, steps + skip), devices=replicas * ranks, max_epochs=-1)
    module = _Regression(build(chosen, mode), slowness.get(trainer.local_rank, 1))
    trainer.fit(module, load_samples(batch_size or chosen.batch_size, chosen.shape))

"""Orders that are whole fits of any model with any strategy, and what other fits have in common with them.

One process, or one for each rank, hosts all contenders in turn, which share the luck of where its memory happens to
lie; each fit draws anew where its own tensors lie. A fit in turns stands still between them instead, on ranks that may
use the package of any tree: it is imported late.
"""

import gc
import itertools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn import functional

from measuring.models import CASES, REGRESSIONS, Case, Segmented, load, load_samples
from measuring.orders import WARM_UP, Orders
from measuring.scenarios import Mode, difference_to_first_rank

_WARM_UP_OF_TURN = 3  # steps after each rest that are not counted


class Classifier(pl.LightningModule):
    """Cross-entropy over a given network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the loss of a batch (inputs, labels)."""
        return functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD, so that the step is forward and backward."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class StepTimes(pl.Callback):
    """A step lasts from the end of the one before to its own: everything that the Trainer does is in it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        """End a step."""
        self.end_step()

    def end_step(self) -> None:
        """Read the clock; to be called by loops without a Trainer."""
        self.ends.append(self._clock())

    @property
    def counted(self) -> list[float]:
        """Seconds of each step after the first one and those of the warm-up."""
        return [end - start for start, end in itertools.pairwise(self.ends)][WARM_UP:]


def make_trainer(strategy: str | Strategy, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """Return a Trainer, on the CPU unless the options say otherwise, that does nothing but train."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        # Named, so that the variables of a cluster's job around us are not taken for ours.
        "plugins": [LightningEnvironment()],
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(strategy=strategy, callbacks=list(callbacks), **{**defaults, **options})


def build(case: Case, mode: Mode) -> nn.Module:
    """Build the network of a case, whose activations are recomputed if the mode says so."""
    torch.manual_seed(0)
    network = case.build()
    if isinstance(network, Segmented):
        network.mode = mode
    return network


def check_ranks(module: pl.LightningModule, steps: int) -> None:
    """Raise an error unless parameters are the same on all ranks; to be called on each of them."""
    if difference := difference_to_first_rank(module):
        raise RuntimeError(f"ranks drift apart: parameters differ by {difference:.1e} after {steps} steps")


def fit(
    orders: Orders,
    *,
    case: str,
    strategy: str,
    steps: int,
    devices: int = 1,
    ranks: int = 1,
    threads: int = 1,
    mode: Mode = "none",
    flags: dict[str, Any] | None = None,
) -> None:
    """Fit for some steps, after the first one and the warm-up, report their times, and check that ranks are identical.

    `mode` is how a `Segmented` network recomputes activations; `flags` are arguments of `DDPStrategy`.
    """
    from lightning_ddp_ext.distributed.exchange import destroy_group  # registers our strategies

    torch.set_num_threads(threads)
    chosen = CASES[case]
    network = build(chosen, mode)
    torch.manual_seed(1 + int(os.environ.get("LOCAL_RANK", 0)))
    module, loader = Classifier(network), load(None, chosen.batch_size // ranks, chosen.shape)
    times = StepTimes()
    trainer = make_trainer(
        strategy if flags is None else DDPStrategy(**flags),
        times,
        devices=devices * ranks,
        max_epochs=-1,
        max_steps=1 + WARM_UP + steps,
    )
    gc.unfreeze()
    gc.collect()  # otherwise this fit clears away the one before
    gc.freeze()  # otherwise a collection of everything takes a quarter of a second, in some contenders' turns by chance
    trainer.fit(module, loader)
    if ranks > 1:
        check_ranks(module, len(times.ends))
        destroy_group()  # `balanced_dp` refuses processes of an earlier strategy
    orders.reply(times.counted)


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
        if len(self._ends) > self._steps + _WARM_UP_OF_TURN:
            self._orders.reply([end - start for start, end in itertools.pairwise(self._ends)][_WARM_UP_OF_TURN:])
            self._steps = self._orders.wait()["steps"]
            self._ends.clear()


def fit_in_turns(
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
    slowness: Mapping[int, int] | None = None,
    skip: int = 0,
) -> None:
    """Fit until the process is killed; `skip` steps come before the first turn, and `slowness` is by rank, else 1.

    Further orders have only the `steps` of a turn.
    """
    import lightning_ddp_ext

    torch.set_num_threads(threads)
    chosen, made = (CASES | REGRESSIONS)[case], strategy
    if arguments:
        made = (pl.strategies.DDPStrategy if strategy == "ddp" else lightning_ddp_ext.BalancedDDPStrategy)(**arguments)
    trainer = make_trainer(made, _Turns(orders, steps + skip), devices=replicas * ranks, max_epochs=-1)
    module = _Regression(build(chosen, mode), (slowness or {}).get(trainer.local_rank, 1))
    trainer.fit(module, load_samples(batch_size or chosen.batch_size, chosen.shape))

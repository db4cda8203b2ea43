"""Orders that are whole fits of any model with any strategy, and what other fits have in common with them.

One process, or one for each rank, hosts all contenders in turn, which share the luck of where its memory happens to
lie; each fit draws anew where its own tensors lie.
"""

import gc
import itertools
import os
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn import functional

from measuring.models import CASES, Case, Segmented, load_endlessly
from measuring.orders import WARM_UP, Orders
from measuring.scenarios import Mode, difference_to_first_rank


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

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        """End a step."""
        self.end_step()

    def end_step(self) -> None:
        """Read the clock; to be called by loops without a Trainer."""
        self.ends.append(time.perf_counter())

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
    """Make sure that parameters are the same on all ranks, on each of them.

    Raises:
        RuntimeError: If they are not.
    """
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
    """Fit for some steps and report their times.

    Args:
        orders: Where to report to.
        case: A key of `CASES`.
        strategy: The Trainer's `strategy`.
        steps: Steps that count, after the first one and those of the warm-up.
        devices: The Trainer's `devices`, of this process.
        ranks: Number of processes that fit together.
        threads: Threads of each process.
        mode: How activations are recomputed; the network has to be `Segmented`.
        flags: Arguments of `DDPStrategy`, if that is the strategy.

    Raises:
        RuntimeError: If ranks are not identical afterwards.
    """
    from lightning_ddp_ext.distributed.exchange import destroy_group  # registers our strategies

    torch.set_num_threads(threads)
    chosen = CASES[case]
    network = build(chosen, mode)
    torch.manual_seed(1 + int(os.environ.get("LOCAL_RANK", 0)))
    module, loader = Classifier(network), load_endlessly(chosen.batch_size // ranks, chosen.shape)
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

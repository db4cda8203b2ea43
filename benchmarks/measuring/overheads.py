"""A contender whose orders are whole fits of a model too small to cost anything; `python -m measuring.overheads`."""

import gc
import itertools
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

import lightning_ddp_ext  # noqa: F401  registers "balanced_dp"
from measuring.models import load_endlessly
from measuring.orders import WARM_UP, Orders

_BATCH_SIZE = 8


class Toy(pl.LightningModule):
    """A linear layer that logs its loss under several names."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self._keys = [f"key{index}" for index in range(keys)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the loss of a batch (inputs, labels)."""
        inputs, labels = batch
        loss = functional.mse_loss(self.layer(inputs)[:, 0], labels.float())
        for key in self._keys:
            self.log(key, loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Times(pl.Callback):
    def __init__(self) -> None:
        self.first_begin = 0.0
        self.ends: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.first_begin = self.first_begin or time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())


def fit(orders: Orders, strategy: str, devices: int, keys: int, steps: int) -> None:
    """Fit for some steps and report their times, and how long it took until there were any.

    Args:
        orders: Where to report to.
        strategy: The Trainer's `strategy`.
        devices: The Trainer's `devices`.
        keys: How many values each step logs.
        steps: Steps that count, after the first one and those of the warm-up.
    """
    times = _Times()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=-1,
        max_steps=1 + WARM_UP + steps,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, loader = Toy(keys), load_endlessly(_BATCH_SIZE, (4,))
    gc.collect()  # otherwise this fit clears away the one before
    called = time.perf_counter()
    trainer.fit(module, loader)
    orders.reply(
        [end - start for start, end in itertools.pairwise(times.ends)][WARM_UP:],
        start_up=times.first_begin - called,
        first_step=times.ends[0] - times.first_begin,
    )


def main() -> None:
    """Fit once for each order."""
    orders = Orders()
    while True:
        fit(orders, **orders.wait())


if __name__ == "__main__":
    main()

"""A contender that trains for as long as it gets orders; run as `python -m measuring.training`."""

import argparse
import itertools
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn
from torch.nn import functional

import lightning_ddp_ext  # noqa: F401  registers "balanced_dp"
from measuring.models import CASES, load_endlessly
from measuring.orders import WARM_UP, Orders


class Classifier(pl.LightningModule):
    """Cross-entropy over a given network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the loss of a batch (inputs, labels)."""
        inputs, labels = batch
        return functional.cross_entropy(self.network(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD, so that the step is forward and backward."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Bursts(pl.Callback):
    """Holds the training until an order comes, lets that many steps pass, and reports the time of each.

    A step lasts from the end of the one before to its own: everything that the Trainer does is in it.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def on_train_start(self, *args: Any) -> None:
        """Rest before the first step."""
        self._wait()

    def on_train_batch_end(self, *args: Any) -> None:
        """Count a step, and rest after the last one of the order."""
        self._ends.append(time.perf_counter())
        if len(self._ends) == 1 + WARM_UP + self._steps:
            seconds = [end - start for start, end in itertools.pairwise(self._ends)]
            self._orders.reply(seconds[WARM_UP:])
            self._wait()

    def _wait(self) -> None:
        self._steps: int = self._orders.wait()["steps"]
        self._ends = [time.perf_counter()]


def main() -> None:
    """Train until there are no more orders."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("strategy")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    orders = Orders()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    case = CASES[arguments.case]
    is_ddp = arguments.strategy == "ddp"
    trainer = pl.Trainer(
        strategy=arguments.strategy,
        accelerator="cpu",
        devices=arguments.devices,
        # Named, so that the variables of a cluster's job around us are not taken for ours.
        plugins=[LightningEnvironment()] if is_ddp else None,
        max_epochs=-1,
        callbacks=[Bursts(orders)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch_size = case.batch_size // arguments.devices if is_ddp else case.batch_size
    trainer.fit(Classifier(case.build()), load_endlessly(batch_size, case.shape))


if __name__ == "__main__":
    main()

"""What cannot be made right, and failures."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.strategies.join_cases.casing import COUNTS, RANK, case, fit, loader
from tests.strategies.join_ranks import Classifier


@case
def a_broadcast_from_a_joined_rank(folder: str) -> Any:
    class Broadcasting(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            dist.broadcast(torch.zeros(1), 2)
            return self.loss(batch)

    fit(Broadcasting())


@case
def keys_that_differ_in_the_uneven_phase(folder: str) -> Any:
    """Rank 0 has no data there, and has the keys of rank 1."""

    class Odd(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if RANK == 1 and batch_idx:
                self.log("odd", 1.0, sync_dist=True)
            return super().training_step(batch, batch_idx)

    fit(Odd(), loader(2, 4, 4))


@case
def keys_that_differ_after_a_manual_backward(folder: str) -> Any:
    class Odd(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            if RANK == 1:
                self.log("odd", 1.0, sync_dist=True)

    fit(Odd(), loader(4, 4, 4))


@case
def keys_in_another_order(folder: str) -> Any:
    class Shuffled(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            for name in ("a", "b") if RANK else ("b", "a"):
                self.log(name, {"a": 1.0, "b": 2.0}[name], sync_dist=True)

    made, _ = fit(Shuffled(), loader(2, 2, 2), loader(*COUNTS))
    return float(made.callback_metrics["a"]), float(made.callback_metrics["b"])


@case
def arguments_that_differ(folder: str) -> Any:
    fit(Classifier(), strategy={"uneven_inputs": "stop" if RANK == 1 else "join"})


@case
def refusing_uneven_data(folder: str) -> Any:
    fit(Classifier(), strategy={"uneven_inputs": "error"})


@case
def refusing_uneven_streams(folder: str) -> Any:
    fit(Classifier(), loader(*COUNTS, stream=True), strategy={"uneven_inputs": "error"})


class Leaving(Classifier):
    """Exits on the only rank that has data, which the others wait for."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            sys.exit()
        return super().training_step(batch, batch_idx)


@case
def an_exit_in_the_uneven_phase(folder: str) -> Any:
    try:
        fit(Leaving())
    except SystemExit:
        return "left"


@case
def an_exit_that_is_saved(folder: str) -> Any:
    """Callbacks save before anything is closed."""
    saving = ModelCheckpoint(f"{folder}/exit", save_on_exception=True)
    try:
        fit(Leaving(), callbacks=[saving], enable_checkpointing=True)
    except SystemExit:
        assert len(os.listdir(f"{folder}/exit")) == 1
        return "left"


@case
def a_failure_in_the_uneven_phase(folder: str) -> Any:
    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise ArithmeticError("boom")
            return super().training_step(batch, batch_idx)

    fit(Failing())

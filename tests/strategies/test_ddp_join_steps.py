"""Steps that log, communicate or fail under `ddp_join` while some of three ranks have no data."""

import os
import signal
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_ddp_ext.errors import DDPExtError, OtherRankError
from tests.strategies.toolkit import RANK, Classifier, assert_identical, fit, loader
from tests.support.devices import virtual_devices_lack

ACTIVE = [[0, 1, 2], [0, 1], [0], [0]]  # the ranks with data in each step
FUNCTIONS = {"mean": lambda values: sum(values) / len(values), "sum": sum, "max": max, "min": min}


# ---------------------------------------------------------------- values and messages


class InTheStep(Classifier):
    """Logs and gathers in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_rank = MeanMetric()
        self.shared = MeanMetric(dist_sync_on_step=True)
        self.rows: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        own = torch.tensor(RANK + 1.0, device=self.device)
        for name in FUNCTIONS:
            self.log(name, own, sync_dist=True, reduce_fx=name, on_step=True, on_epoch=False)
        self.log("own", own, on_step=True, on_epoch=False)
        self.shared(own.double())
        self.log("shared", self.shared, on_step=True, on_epoch=False)
        gathered = self.all_gather(self.network[2].bias.sum() * own, sync_grads=True)
        self.rows.append((len(gathered), len(self.all_gather({"a": own})["a"])))
        self.mean_rank.update(own)
        self.mean_rank.compute()  # of the ranks that have data
        self.log("mean_rank", self.mean_rank, on_step=False, on_epoch=True)
        return self.loss(batch) + gathered.sum()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("start", RANK + 1.0, sync_dist=True, on_step=True, on_epoch=True)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.log("end", RANK + 1.0, sync_dist=True, on_step=True, on_epoch=False)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", RANK + 1.0, sync_dist=True)


@virtual_devices_lack("all_to_all")
@pytest.mark.ranks(3)
def test_steps_log_and_communicate_among_the_ranks_with_data() -> None:
    module = InTheStep()
    made, trace = fit(module)
    assert_identical(trace.digests)
    assert module.rows == [(len(active), len(active)) for active in ACTIVE if RANK in active]
    for active, metrics in zip(ACTIVE, trace.metrics, strict=True):
        expected = {name: reduce([other + 1 for other in active]) for name, reduce in FUNCTIONS.items()}
        assert {name: metrics[name] for name in expected} == expected
        assert metrics["start_step"] == metrics["end"] == metrics["shared"] == expected["mean"]
        assert metrics["own"] == RANK + 1
    metrics = {name: float(value) for name, value in made.callback_metrics.items()}
    assert metrics["epoch"] == 2  # all ranks run hooks of epochs
    assert [metrics["mean_rank"], metrics["start_epoch"]] == pytest.approx([(1 * 4 + 2 * 2 + 3) / 7] * 2)


class Accumulating(Classifier):
    """Steps every other batch, and logs before and between backward passes; rank 0 makes more of those."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.log("before", loss, sync_dist=True)
        for _ in range(2 if RANK == 0 else 1):
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(loss / 4, retain_graph=True)
        self.manual_backward(loss / 2)
        self.log("between", loss, sync_dist=True)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(3)
def test_values_logged_around_manual_backward_passes_are_synchronised() -> None:
    _, trace = fit(Accumulating())
    assert_identical((trace.digests, trace.metrics))
    assert len(trace.digests) == 4
    assert all(metrics.keys() >= {"before", "between"} for metrics in trace.metrics)


@pytest.mark.ranks(3)
def test_within_a_window_a_rank_finds_its_own_gradient_or_none() -> None:
    found: list[Any] = []

    class Looking(Classifier):
        def on_after_backward(self) -> None:
            found.append(self.network[0].weight.grad)

    fit(Looking(), accumulate_grad_batches=2)
    assert [gradient is None for gradient in found] == [False, False, RANK > 0, False]
    assert_identical(found[-1].tolist())


# ---------------------------------------------------------------- errors


@pytest.mark.ranks(3)
def test_a_checkpoint_is_saved_when_a_rank_fails_and_signal_handlers_are_restored(folder: str) -> None:
    class Failing(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and RANK == 1:
                raise ArithmeticError("boom")

    handler = signal.getsignal(signal.SIGTERM)
    saving = ModelCheckpoint(f"{folder}/failure", "{step}", save_on_exception=True)
    with pytest.raises(OtherRankError if RANK != 1 else ArithmeticError, match="boom"):
        fit(Failing(), loader(6, 6, 6), strategy="ddp_checkpoint", callbacks=[saving], enable_checkpointing=True)
    assert signal.getsignal(signal.SIGTERM) is handler
    if RANK == 0:
        files = [f"{folder}/failure/{name}" for name in os.listdir(f"{folder}/failure")]
        assert [torch.load(file, weights_only=True)["global_step"] for file in files] == [2]


@pytest.mark.ranks(3)
def test_waiting_ranks_hear_of_a_rank_that_exits(folder: str) -> None:
    """It is the only rank with data. The last test of the launch, because a process group does not survive it."""

    class Leaving(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                sys.exit()
            return super().training_step(batch, batch_idx)

    saving = ModelCheckpoint(f"{folder}/exit", save_on_exception=True)
    with pytest.raises((SystemExit, DDPExtError)) as caught:
        fit(Leaving(), callbacks=[saving], enable_checkpointing=True)
    if RANK:
        assert str(caught.value).startswith(f"rank 0 ended the run while rank {RANK} still waited")
    else:
        assert caught.type is SystemExit
        assert os.listdir(f"{folder}/exit")  # saved before anything is closed

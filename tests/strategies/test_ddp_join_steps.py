"""Steps that log, communicate, change state or fail under `ddp_join` while some of three ranks have no data."""

import copy
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional
from torchmetrics import MeanMetric

from lightning_ddp_ext.errors import DDPExtError, RanksOutOfStepError
from tests.strategies.toolkit import (
    ALONE,
    COUNTS,
    RANK,
    Classifier,
    Polyak,
    assert_identical,
    fit,
    loader,
    run_on_ranks,
    trainer,
    values_of,
    whole_loader,
)
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


def steps_log_and_communicate_among_the_ranks_with_data(folder: str) -> None:
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


def a_metric_has_the_value_of_all_ranks_in_every_epoch(folder: str) -> None:
    """One rank never has data for validation."""

    class Measured(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.mean.update(RANK + 1.0)
            self.log("metric", self.mean)

    made, _ = fit(Measured(), loader(2, 2, 2), loader(4, 2, 0), max_epochs=3)
    assert float(made.callback_metrics["metric"]) == pytest.approx((1 + 1 + 2) / 3)


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


def values_logged_around_manual_backward_passes_are_synchronised(folder: str) -> None:
    _, trace = fit(Accumulating())
    assert_identical((trace.digests, trace.metrics))
    assert len(trace.digests) == 4
    assert all(metrics.keys() >= {"before", "between"} for metrics in trace.metrics)


def within_a_window_a_rank_finds_its_own_gradient_or_none(folder: str) -> None:
    found: list[Any] = []

    class Looking(Classifier):
        def on_after_backward(self) -> None:
            found.append(self.network[0].weight.grad)

    fit(Looking(), accumulate_grad_batches=2)
    assert [gradient is None for gradient in found] == [False, False, RANK > 0, False]
    assert_identical(found[-1].tolist())


# ---------------------------------------------------------------- changes beside gradients


class Changing(Classifier):
    """A student that learns from labels and from a teacher; each step changes something."""

    def __init__(self, change: Callable[["Changing"], None]) -> None:
        super().__init__()
        self.change = change
        self.teacher = copy.deepcopy(self.network).requires_grad_(False)
        self.tau = 0.5
        self.limits = (0.0, 1.0)
        self.weight = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.change(self)
        scores = self.network(batch[0])
        distance = (scores - self.teacher(batch[0])).square().mean()
        scale = self.weight + self.limits[0]
        return scale * functional.cross_entropy(scores, batch[1]) + self.tau * distance

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]


def learning_rate(module: Changing) -> None:
    for group in module.optimizers().param_groups:
        group["lr"] *= 0.8


def teacher(module: Changing) -> None:
    with torch.no_grad():
        for mean, parameter in zip(module.teacher.parameters(), module.network.parameters(), strict=True):
            mean.mul_(0.7).add_(parameter, alpha=0.3)


def teacher_replaced(module: Changing) -> None:
    module.teacher = copy.deepcopy(module.network).requires_grad_(False)


def numbers(module: Changing) -> None:
    module.tau *= 0.9
    module.limits = (module.limits[0] + 0.1, 1.0)
    module.weight *= 1.1
    module.new = module.tau


def momentum(module: Changing) -> None:
    for state in module.optimizers().state.values():
        state["momentum_buffer"].mul_(0.5)


def frozen(module: Changing) -> None:
    module.network[0].requires_grad_(module.trainer.global_step % 3 == 0)


def nothing(module: Changing) -> None:
    pass


CHANGES = (learning_rate, teacher, teacher_replaced, numbers, momentum, frozen)


class Keep(Callback):
    """Keeps the state of a rank after every batch."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, list[Any]]] = []

    def on_train_batch_end(self, trainer: Any, module: Changing, *_: Any) -> None:
        optimizer, schedule = trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler
        state = [value for of_one in optimizer.state.values() for value in of_one.values()]
        tensors = [part.detach().flatten().cpu() for part in (*module.state_dict().values(), *state)]
        others = [float(optimizer.param_groups[0]["lr"]), schedule.last_epoch]
        others += [module.tau, module.limits, module.weight, *(p.requires_grad for p in module.parameters())]
        self.kept.append((torch.cat(tensors), others))


def fit_changing(change: Callable[[Changing], None], given: Any, **options: Any) -> list[tuple[Tensor, list[Any]]]:
    torch.manual_seed(0)
    keep = Keep()
    trainer(keep, max_epochs=2, **options).fit(Changing(change), given)
    return keep.kept


def steps_change_more_than_gradients(folder: str) -> Any:
    """Keep the state after each batch, with the last ranks or the first ranks out of data first."""
    return {
        (change.__name__, counts): fit_changing(change, loader(*counts))
        for change in CHANGES
        for counts in (COUNTS, COUNTS[::-1])
    }


class SecondOrder(Classifier):
    """Layers in float64 in a LightningModule of float32, so that a step's loss is not of the module's type."""

    def __init__(self) -> None:
        super().__init__(torch.optim.LBFGS, lr=1, max_iter=5, history_size=3, line_search_fn="strong_wolfe")
        self.network.double()


class WithHistory(torch.optim.Optimizer):
    """Keeps the last gradients of each parameter in a list, which it changes in place, and a number of steps."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.state["steps"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            history = self.state[parameter].setdefault("history", [])
            history.append(parameter.grad.clone())
            del history[:-3]
            parameter.sub_(sum(history), alpha=0.1 / (1 + int(self.state["steps"])))
        self.state["steps"] += 1


class SteppingItself(Classifier):
    def __init__(self) -> None:
        super().__init__(WithHistory)
        self.automatic_optimization = False
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.steps += 1  # after the last synchronisation of the step


class SteppingByTheLoss(Classifier):
    """Calls a closure, on whose loss the step depends, with Lightning's optimizer or with torch's."""

    def __init__(self, is_raw: bool) -> None:
        super().__init__(Polyak)
        self.automatic_optimization, self.is_raw = False, is_raw

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=not self.is_raw)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


OPTIMIZED: dict[str, tuple[Callable[[], Classifier], str, float]] = {  # module, precision, tolerance
    "second order in another precision": (SecondOrder, "32-true", 1e-6),
    "lists in the state, and a buffer changed last": (SteppingItself, "64-true", 1e-12),
    "by the loss, manually": (partial(SteppingByTheLoss, False), "64-true", 1e-12),
    "by the loss, with torch's optimizer": (partial(SteppingByTheLoss, True), "64-true", 1e-12),
}


def fit_optimized(name: str, given: Any, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    make, precision, _ = OPTIMIZED[name]
    module = make()
    parameters = fit(module, given, precision=precision, max_epochs=2, **options)[1].parameters
    return [parameters, *(buffer.cpu() for buffer in module.buffers())]


def optimizers_of_every_kind(folder: str) -> Any:
    return {name: fit_optimized(name, loader(*COUNTS)) for name in OPTIMIZED}


# ---------------------------------------------------------------- errors


def keys_that_differ_among_ranks_are_named(folder: str) -> None:
    class OddAfterManualBackward(Accumulating):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            if RANK == 1:
                self.log("odd", 1.0, sync_dist=True)

    with pytest.raises(DDPExtError, match=r"rank 1 logs `odd` with `sync_dist=True` in `training_step`, rank 0 does"):
        fit(OddAfterManualBackward(), loader(4, 4, 4))


def a_step_that_one_rank_leaves_out_is_refused(folder: str) -> None:
    """While all ranks have data, after one has run out, and in the last batch."""

    class LeavingOut(SteppingItself):
        def __init__(self, first: int) -> None:
            super().__init__()
            self.first = first

        def optimizers(self, *args: Any) -> Any:
            optimizer = super().optimizers(*args)
            if RANK == 1 and self.trainer.global_step >= self.first:
                optimizer.step = lambda: None
            return optimizer

    for first in (0, 2, 3):
        with pytest.raises(RanksOutOfStepError, match=rf"rank {RANK} has made \d+ optimizer steps, others \d+"):
            fit(LeavingOut(first), loader(8, 8, 2))


def waiting_ranks_hear_of_a_rank_that_exits(folder: str) -> None:
    """It is the only rank with data."""

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


CHECKS = [
    steps_log_and_communicate_among_the_ranks_with_data,
    a_metric_has_the_value_of_all_ranks_in_every_epoch,
    values_logged_around_manual_backward_passes_are_synchronised,
    within_a_window_a_rank_finds_its_own_gradient_or_none,
    keys_that_differ_among_ranks_are_named,
    a_step_that_one_rank_leaves_out_is_refused,
    waiting_ranks_hear_of_a_rank_that_exits,
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    cases = [steps_change_more_than_gradients, optimizers_of_every_kind, *CHECKS]
    return run_on_ranks(3, cases, tmp_path_factory.mktemp("steps"))


@pytest.mark.parametrize(
    "case",
    [pytest.param(CHECKS[0], marks=virtual_devices_lack("all_to_all")), *CHECKS[1:]],
    ids=lambda case: case.__name__,
)
def test_on_every_rank(found, case):
    values_of(found, case)


@pytest.mark.parametrize("counts", [COUNTS, COUNTS[::-1]], ids=str)
def test_changes_of_a_step_reach_ranks_without_data(found, counts):
    by_rank = values_of(found, steps_change_more_than_gradients)
    unchanged, others_unchanged = fit_changing(nothing, whole_loader(*counts), **ALONE)[-1]
    for change in CHANGES:
        name, alone = change.__name__, fit_changing(change, whole_loader(*counts), **ALONE)
        of_ranks = [of_rank[name, counts] for of_rank in by_rank]
        assert len(alone) == len(of_ranks[0]) == 8
        for found_here in of_ranks:
            for (own, others), (first, _), (wanted, expected) in zip(found_here, of_ranks[0], alone, strict=True):
                assert torch.equal(own, first), name
                torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12, msg=name)
                assert others == expected, name
        tensors, others = alone[-1]
        is_same = tensors.shape == unchanged.shape and torch.allclose(tensors, unchanged)
        assert not is_same or others != others_unchanged, f"{name} has no effect"


@pytest.mark.parametrize("name", OPTIMIZED)
def test_optimizers_with_a_state_of_any_kind_equal_one_process(found, name):
    alone = fit_optimized(name, whole_loader(*COUNTS), **ALONE)
    by_rank = [of_rank[name] for of_rank in values_of(found, optimizers_of_every_kind)]
    for tensors in by_rank:
        for own, first, expected in zip(tensors, by_rank[0], alone, strict=True):
            assert torch.equal(own, first)
            torch.testing.assert_close(own, expected, rtol=0, atol=OPTIMIZED[name][2])

"""Steps that log, communicate, change state or fail under `ddp_join` while some ranks have no data. One launch."""

import copy
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MaxMetric, MeanMetric

from lightning_ddp_ext.errors import DDPExtError
from tests.strategies.join_ranks import (
    COUNTS,
    RANK,
    Classifier,
    assert_identical,
    fit,
    loader,
    run_cases,
    trainer,
    values_of,
    whole_batches,
)
from tests.support.processes import run_processes

ACTIVE = [[0, 1, 2], [0, 1], [0], [0]]  # the ranks with data in each step
FUNCTIONS = {"mean": lambda values: sum(values) / len(values), "sum": sum, "max": max, "min": min}


class InTheStep(Classifier):
    """Logs, gathers and reduces in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = MaxMetric(dist_sync_on_step=True)
        self.mean_rank = MeanMetric()
        self.shared = MeanMetric(dist_sync_on_step=True)
        self.found: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        own = torch.tensor(RANK + 1.0, device=self.device)
        for name in FUNCTIONS:
            self.log(name, own, sync_dist=True, reduce_fx=name, on_step=True, on_epoch=False)
        self.log("own", own, on_step=True, on_epoch=False)
        self.shared(own.double())
        self.log("shared", self.shared, on_step=True, on_epoch=False)
        scale = self.network[2].bias.sum() * own
        gathered = self.all_gather(scale, sync_grads=True)
        total = own.clone()
        dist.all_reduce(total)
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, f"rank {RANK}")
        self.found.append(
            {
                "rows": len(gathered),
                "rows of a dictionary": len(self.all_gather({"a": own})["a"]),
                "total": total.item(),
                "names": names,
                "largest": self.largest(-own).item(),
            }
        )
        self.mean_rank.update(own)
        self.mean_rank.compute()  # of the ranks that have data
        self.log("mean_rank", self.mean_rank, on_step=False, on_epoch=True)
        return loss + gathered.sum()

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
    for active, values in zip([active for active in ACTIVE if RANK in active], module.found, strict=True):
        assert values["rows"] == values["rows of a dictionary"] == len(active)
        assert values["total"] == sum(other + 1 for other in active)
        assert values["names"] == [f"rank {other}" if other in active else None for other in range(3)]
        assert values["largest"] == -1
    for active, metrics in zip(ACTIVE, trace.metrics, strict=True):
        expected = {name: reduce([other + 1 for other in active]) for name, reduce in FUNCTIONS.items()}
        assert {name: metrics[name] for name in expected} == expected
        assert metrics["start_step"] == metrics["end"] == metrics["shared"] == expected["mean"]
        assert metrics["own"] == RANK + 1
    metrics = {name: float(value) for name, value in made.callback_metrics.items()}
    assert metrics["epoch"] == 2  # all ranks run hooks of epochs
    assert metrics["mean_rank"] == pytest.approx((1 * 4 + 2 * 2 + 3) / 7)
    assert metrics["start_epoch"] == pytest.approx((1 * 4 + 2 * 2 + 3) / 7)


def ranks_with_data_have_equal_weights_in_a_step_without_weight(folder: str) -> None:
    class Weightless(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            for name in FUNCTIONS:
                self.log(name, RANK + 1.0, sync_dist=True, reduce_fx=name, on_step=True, on_epoch=False)
            self.log("over_epoch", RANK + 1.0, sync_dist=True, on_step=False, on_epoch=True)
            return self.loss(batch)

    made, trace = fit(Weightless(), loader(4, 4, 2), strategy={"weight_by": lambda batch: 0.0})
    expected = [{"mean": 2, "sum": 6, "max": 3, "min": 1}, {"mean": 1.5, "sum": 3, "max": 2, "min": 1}]
    assert [{name: seen[name] for name in FUNCTIONS} for seen in trace.metrics] == expected
    assert float(made.callback_metrics["over_epoch"]) == pytest.approx((2 * 6 + 1.5 * 4) / 10)


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


class Changing(Classifier):
    """A student that learns from labels and from a teacher; each step changes something."""

    def __init__(self, change: Callable[["Changing"], None]) -> None:
        super().__init__()
        self.change = change
        self.teacher = copy.deepcopy(self.network).requires_grad_(False)
        self.tau = 0.5
        self.limits = (0.0, 1.0)
        self.settings = {"weight": 1.0}
        self.register_buffer("queue", torch.zeros(1, dtype=torch.float64))
        self.counted = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.change(self)
        self.counted += len(batch[0])
        self.seen.extend(batch[0].tolist())
        scores = self.network(batch[1])
        distance = (scores - self.teacher(batch[1])).square().mean()
        scale = self.settings["weight"] + self.limits[0] + len(self.queue) + self.queue.sum()
        return scale * functional.cross_entropy(scores, batch[2]) + self.tau * distance

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]

    def pairs(self) -> Any:
        return zip(self.teacher.parameters(), self.network.parameters(), strict=True)


def learning_rate(module: Changing) -> None:
    for group in module.optimizers().param_groups:
        group["lr"] *= 0.8


def clamped_silently(module: Changing) -> None:
    for parameter in module.network.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def teacher(module: Changing) -> None:
    with torch.no_grad():
        for mean, parameter in module.pairs():
            mean.mul_(0.7).add_(parameter, alpha=0.3)


def teacher_replaced(module: Changing) -> None:
    module.teacher = copy.deepcopy(module.network).requires_grad_(False)


def numbers(module: Changing) -> None:
    module.tau *= 0.9
    module.limits = (module.limits[0] + 0.1, 1.0)
    module.settings["weight"] *= 1.1
    module.new = module.tau


def attribute_of_optimizer(module: Changing) -> None:
    optimizer = module.optimizers().optimizer
    optimizer.rho = getattr(optimizer, "rho", 1.0) * 0.5


def momentum(module: Changing) -> None:
    for state in module.optimizers().state.values():
        state["momentum_buffer"].mul_(0.5)


def frozen(module: Changing) -> None:
    module.network[0].requires_grad_(module.trainer.global_step % 3 == 0)


def buffer(module: Changing) -> None:
    module.queue = torch.cat([module.queue, module.queue[:1] + 0.1])


CHANGES = {
    change.__name__: change
    for change in (
        learning_rate, clamped_silently, teacher, teacher_replaced, numbers, attribute_of_optimizer, momentum, frozen,
        buffer,
    )
}  # fmt: skip


class Keep(Callback):
    """Keeps the state of a rank after every batch."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, module: Changing, *_: Any) -> None:
        optimizer, schedule = trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler
        state = [value.flatten() for of_one in optimizer.state.values() for value in of_one.values()]
        self.kept.append(
            {
                "tensors": torch.cat(
                    [part.detach().flatten().cpu() for part in (*module.state_dict().values(), *state)]
                ),
                "settings": [float(optimizer.param_groups[0]["lr"]), schedule.last_epoch],
                "requires_grad": [parameter.requires_grad for parameter in module.parameters()],
                "attributes": [module.tau, module.limits, dict(module.settings), getattr(optimizer, "rho", 0)],
            }
        )


def fit_changing(change: Callable[[Changing], None], given: Any, **options: Any) -> tuple[list[Any], Changing]:
    torch.manual_seed(0)
    module, keep = Changing(change), Keep()
    trainer(keep, max_epochs=2, **options).fit(module, given)
    return keep.kept, module


def steps_change_more_than_gradients(folder: str) -> Any:
    """Keep the state after each batch, with the last ranks or the first ranks out of data first."""
    return {
        (name, counts): fit_changing(change, loader(*counts))[0]
        for name, change in CHANGES.items()
        for counts in (COUNTS, COUNTS[::-1])
    }


def a_counter_of_samples_stays_the_counter_of_the_rank(folder: str) -> None:
    """The last rank never has a sample."""
    module = fit_changing(lambda module: None, loader(8, 4, 0))[1]
    assert module.counted == len(module.seen) == (16, 8, 0)[RANK]


class SecondOrder(Classifier):
    """Layers in float64 in a LightningModule of float32, so that a step's loss is not of the module's type."""

    def __init__(self) -> None:
        super().__init__()
        self.network.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.network.parameters(), max_iter=5, history_size=3, line_search_fn="strong_wolfe")


def fit_second_order(given: Any, **options: Any) -> Tensor:
    torch.manual_seed(0)
    module = SecondOrder()
    trainer(precision="32-true", max_epochs=2, **options).fit(module, given)
    return nn.utils.parameters_to_vector(module.parameters()).detach().cpu()


def second_order_in_another_precision(folder: str) -> Any:
    return fit_second_order(loader(*COUNTS))


class WithHistory(torch.optim.Optimizer):
    """Keeps the last gradients of each parameter in a list, which it changes in place, and a number of steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.state["steps"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for parameter in self.param_groups[0]["params"]:
            history = self.state[parameter].setdefault("history", [])
            history.append(parameter.grad.clone())
            del history[:-3]
            parameter.sub_(sum(history), alpha=0.1 / (1 + int(self.state["steps"])))
        self.state["steps"] += 1
        return loss


class SteppingItself(Classifier):
    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = functional.cross_entropy(self.network(batch[1]), batch[2])
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.steps += 1  # after the last synchronisation of the step
        return None

    def configure_optimizers(self) -> Any:
        return WithHistory(self.network.parameters())


def fit_with_history(automatic: bool, given: Any, **options: Any) -> tuple[Tensor, float]:
    torch.manual_seed(0)
    module = SteppingItself(automatic)
    trainer(max_epochs=2, **options).fit(module, given)
    return nn.utils.parameters_to_vector(module.parameters()).detach().cpu(), module.steps.item()


def optimizers_with_a_history(folder: str) -> Any:
    return {automatic: fit_with_history(automatic, loader(*COUNTS)) for automatic in (True, False)}


def refused(expected: str, module: Classifier, *loaders: Any, **options: Any) -> None:
    with pytest.raises(DDPExtError) as caught:
        fit(module, *loaders, **options)
    assert expected in str(caught.value)


def a_broadcast_from_a_joined_rank_is_refused(folder: str) -> None:
    class Broadcasting(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            dist.broadcast(torch.zeros(1, device=self.device), 2)
            return self.loss(batch)

    refused("sends from rank 2, but rank 2 has run out of data", Broadcasting())


def keys_that_differ_among_ranks_are_named(folder: str) -> None:
    class OddInTheUnevenPhase(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if RANK == 1 and batch_idx:
                self.log("odd", 1.0, sync_dist=True)
            return super().training_step(batch, batch_idx)

    class OddAfterManualBackward(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            if RANK == 1:
                self.log("odd", 1.0, sync_dist=True)

    message = "rank 1 logs `odd` with `sync_dist=True` in `training_step`, rank {} does not"
    refused(message.format(2), OddInTheUnevenPhase(), loader(2, 4, 4))  # rank 0 has no data and the keys of rank 1
    refused(message.format(0), OddAfterManualBackward(), loader(4, 4, 4))


def keys_may_be_logged_in_any_order(folder: str) -> None:
    class Shuffled(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            for name in ("a", "b") if RANK else ("b", "a"):
                self.log(name, {"a": 1.0, "b": 2.0}[name], sync_dist=True)

    made, _ = fit(Shuffled(), loader(2, 2, 2), loader(*COUNTS))
    assert (float(made.callback_metrics["a"]), float(made.callback_metrics["b"])) == (1.0, 2.0)


def arguments_that_differ_are_named_with_their_ranks(folder: str) -> None:
    expected = "argument `uneven_inputs` is join on ranks 0, 2 but stop on rank 1"
    refused(expected, Classifier(), strategy={"uneven_inputs": "stop" if RANK == 1 else "join"})


def uneven_data_is_refused_on_request(folder: str) -> None:
    strategy = {"uneven_inputs": "error"}
    sized = "rank 2 runs out of data after batch 1, while rank 0 has 4 batches"
    refused(sized, Classifier(), strategy=strategy)
    streams = "rank 2 ran out of data after batch 1, other ranks have more"
    refused(streams, Classifier(), loader(*COUNTS, stream=True), strategy=strategy)


class Leaving(Classifier):
    """Exits on the only rank with data, while the others wait."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            sys.exit()
        return super().training_step(batch, batch_idx)


def waiting_ranks_hear_of_a_rank_that_exits(folder: str) -> None:
    for saves in (False, True):
        saving = ModelCheckpoint(f"{folder}/exit", save_on_exception=saves)
        with pytest.raises((SystemExit, DDPExtError)) as caught:
            fit(Leaving(), callbacks=[saving], enable_checkpointing=True)
        if RANK:
            assert str(caught.value).startswith("rank 0 ended the run while others still waited")
        else:
            assert caught.type is SystemExit
            assert not saves or os.listdir(f"{folder}/exit")  # saved before anything is closed


def waiting_ranks_hear_of_a_rank_that_fails(folder: str) -> None:
    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise ArithmeticError("boom")
            return super().training_step(batch, batch_idx)

    with pytest.raises((ArithmeticError, DDPExtError)) as caught:
        fit(Failing())
    message = "rank 0 failed: ArithmeticError: boom (at step 2, training, batch 2, in training_step ("
    assert f"{caught.type.__name__}: {caught.value}".startswith(
        f"OtherRankError: {message}" if RANK else "ArithmeticError: boom"
    )


CHECKS = [
    steps_log_and_communicate_among_the_ranks_with_data,
    ranks_with_data_have_equal_weights_in_a_step_without_weight,
    a_metric_has_the_value_of_all_ranks_in_every_epoch,
    a_counter_of_samples_stays_the_counter_of_the_rank,
    a_broadcast_from_a_joined_rank_is_refused,
    keys_that_differ_among_ranks_are_named,
    keys_may_be_logged_in_any_order,
    arguments_that_differ_are_named_with_their_ranks,
    uneven_data_is_refused_on_request,
    waiting_ranks_hear_of_a_rank_that_exits,
    waiting_ranks_hear_of_a_rank_that_fails,
]
CASES = [steps_change_more_than_gradients, second_order_in_another_precision, optimizers_with_a_history, *CHECKS]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_processes(run_cases, 3, CASES, str(tmp_path_factory.mktemp("steps")), timeout=200)


@pytest.mark.parametrize("case", CHECKS, ids=lambda case: case.__name__)
def test_on_every_rank(found, case):
    values_of(found, case)


@pytest.mark.parametrize("counts", [COUNTS, COUNTS[::-1]], ids=str)
def test_changes_of_a_step_reach_ranks_without_data(found, counts):
    by_rank = values_of(found, steps_change_more_than_gradients)
    batches = whole_batches(counts)
    unchanged = fit_changing(lambda module: None, batches, strategy="auto", devices=1)[0][-1]
    for name, change in CHANGES.items():
        alone = fit_changing(change, batches, strategy="auto", devices=1)[0]
        for of_rank in by_rank:
            for own, first, expected in zip(of_rank[name, counts], by_rank[0][name, counts], alone, strict=True):
                assert torch.equal(own["tensors"], first["tensors"]), name
                torch.testing.assert_close(own["tensors"], expected["tensors"], rtol=0, atol=1e-12, msg=name)
                assert {**own, "tensors": 0} == {**expected, "tensors": 0}, name
        is_same = alone[-1]["tensors"].shape == unchanged["tensors"].shape and torch.allclose(
            alone[-1]["tensors"], unchanged["tensors"]
        )
        assert not is_same or {**alone[-1], "tensors": 0} != {**unchanged, "tensors": 0}, f"{name} has no effect"


def test_second_order_optimizers_have_the_same_loss_on_ranks_without_data_in_any_precision(found):
    expected = fit_second_order(whole_batches(COUNTS), strategy="auto", devices=1)
    by_rank = values_of(found, second_order_in_another_precision)
    for parameters in by_rank:
        assert torch.equal(parameters, by_rank[0])
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("automatic", [True, False])
def test_lists_in_optimizer_state_and_a_buffer_changed_last_equal_one_process(found, automatic):
    expected, steps = fit_with_history(automatic, whole_batches(COUNTS), strategy="auto", devices=1)
    by_rank = [of_rank[automatic] for of_rank in values_of(found, optimizers_with_a_history)]
    for parameters, counted in by_rank:
        assert torch.equal(parameters, by_rank[0][0])
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)
        assert counted == steps == (0 if automatic else 8)

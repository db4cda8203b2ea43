"""What modules override around backward and the optimizer runs once, on the gradient of the whole batch."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lightning_ddp_ext import UnsupportedFeatureError
from tests.support.training import Classifier, balanced, compare, relative_difference, seeded, train


class Overriding(Classifier):
    """Overrides everything between the loss and the next step, and notes each call; with SGD, as Adam undoes scales."""

    def __init__(self):
        super().__init__()
        self.notes = []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def log(self, name, value, *args, **kwargs):
        self.notes.append(f"log {name}")
        super().log(f"own/{name}", value, *args, **kwargs)

    def on_before_backward(self, loss):
        self.notes.append(("before backward", loss.ndim, loss.requires_grad))

    def backward(self, loss, *args, **kwargs):
        self.notes.append("backward")
        (3 * loss).backward(*args, **kwargs)

    def on_after_backward(self):
        self.notes.append("after backward")
        for parameter in self.parameters():
            parameter.grad.add_(0.01 * parameter.detach())

    def on_before_optimizer_step(self, optimizer):
        self.notes.append("before step")
        for parameter in self.parameters():
            parameter.grad.mul_(parameter.grad.abs() > 0.001)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.notes.append("clipping")
        limit = 0.1 * (1 + self.current_epoch)
        self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.notes.append("step")
        if batch_idx % 3 == 2:  # skipped
            optimizer_closure()
            return
        optimizer.step(closure=optimizer_closure)

    def on_before_zero_grad(self, optimizer):
        self.notes.append("before zero_grad")

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.notes.append("zero_grad")
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)  # keeps a part of the last gradient

    def lr_scheduler_step(self, scheduler, metric):
        self.notes.append("scheduler")
        scheduler.step()


def test_overrides_run_as_often_and_with_the_same_result():
    single, parallel = compare(Overriding)
    assert parallel.module.notes == single.module.notes
    assert len({str(note) for note in single.module.notes}) == 11
    plain = train(seeded(Classifier)).gradients.before_step
    assert relative_difference(single.gradients.before_step[:1], plain[:1]) > 1e-2


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("weight_by", ["samples", lambda chunk: len(chunk[0]) > 2], ids=["samples", "not the first"])
def test_a_graph_of_the_gradients_is_refused_at_the_first_backward_pass(weight_by):
    class SecondOrder(Classifier):
        def backward(self, loss, *args, **kwargs):
            loss.backward(create_graph=True)

    message = r"backward\(create_graph=True\).*AdaHessian, with `strategy=\"auto"
    with pytest.raises(UnsupportedFeatureError, match=message):
        train(seeded(SecondOrder), balanced([2, 6], weight_by=weight_by), 2, max_epochs=1)


def slow_down(module):
    for group in module.optimizers().param_groups:
        group["lr"] *= 0.9


def slow_down_in_place(module):
    module.optimizers().param_groups[0]["lr"].mul_(0.9)


def add_a_group(module):
    module.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.5})


def set_what_is_set(module):
    for group in module.optimizers().param_groups:
        group["lr"] = float(str(group["lr"]))


class Changing(Classifier):
    """Changes its optimizer in a step or in a hook."""

    def __init__(self, change, place):
        super().__init__()
        self.change, self.place = change, place

    def training_step(self, batch, batch_idx):
        if self.place == "step":
            self.change(self)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args):
        if self.place == "hook":
            self.change(self)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=torch.tensor(0.05) if self.change is slow_down_in_place else 0.05)


def groups_of(trained):
    return [
        {**group, "lr": float(group["lr"]), "params": len(group["params"])}
        for group in trained.trainer.optimizers[0].param_groups
    ]


@pytest.mark.parametrize(
    ("change", "place"),
    [(slow_down, r"\[0\]\['lr'\]"), (slow_down_in_place, r"\[0\]\['lr'\]"), (add_a_group, r"\[1\]\['params'\]")],
)
def test_a_step_that_changes_its_optimizer_is_refused_and_a_hook_may(change, place):
    message = rf"`param_groups{place}` of the optimizer SGD was changed inside `training_step`.*`on_train_batch_start`"
    with pytest.raises(UnsupportedFeatureError, match=message):
        train(Changing(change, "step"), balanced([2, 6]), 2)
    single, parallel = compare(lambda: Changing(change, "hook"), {"max_epochs": 1})
    unchanged = train(seeded(lambda: Changing(change, None)), max_epochs=1)
    assert groups_of(parallel) == groups_of(single) != groups_of(unchanged)


@pytest.mark.parametrize(("change", "split"), [(slow_down, [0, 8]), (set_what_is_set, [2, 6])])
def test_a_step_may_change_its_optimizer_on_a_single_active_replica_or_set_an_equal_value(change, split):
    single, parallel = compare(lambda: Changing(change, "step"), {"max_epochs": 1}, split=split)
    assert groups_of(parallel) == groups_of(single)

"""Steps that change what is trained, beside its gradients, while some ranks have no data."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.strategies.join_cases.casing import COUNTS, case, loader, trainer
from tests.strategies.join_ranks import Classifier, samples


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


def clamped(module: Changing) -> None:
    with torch.no_grad():
        for parameter in module.network.parameters():
            parameter.clamp_(-0.3, 0.3)


def clamped_silently(module: Changing) -> None:
    for parameter in module.network.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def teacher(module: Changing) -> None:
    with torch.no_grad():
        for mean, parameter in module.pairs():
            mean.mul_(0.7).add_(parameter, alpha=0.3)


def teacher_assigned(module: Changing) -> None:
    for mean, parameter in module.pairs():
        mean.data = mean.data * 0.7 + parameter.data * 0.3


def teacher_silently(module: Changing) -> None:
    for mean, parameter in module.pairs():
        mean.data.mul_(0.7).add_(parameter.data, alpha=0.3)


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


def scheduler(module: Changing) -> None:
    module.lr_schedulers().step()


def buffer(module: Changing) -> None:
    module.queue = torch.cat([module.queue, module.queue[:1] + 0.1])


CHANGES = {
    change.__name__: change
    for change in (
        learning_rate, clamped, clamped_silently, teacher, teacher_assigned, teacher_silently, teacher_replaced,
        numbers, attribute_of_optimizer, momentum, frozen, scheduler, buffer,
    )
}  # fmt: skip


class Keep(Callback):
    """Keeps what a rank has after every batch."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, module: Changing, *_: Any) -> None:
        optimizer, schedule = trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler
        state = [value.flatten() for of_one in optimizer.state.values() for value in of_one.values()]
        self.kept.append(
            {
                "tensors": torch.cat([*(value.detach().flatten() for value in module.state_dict().values()), *state]),
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


def whole_batches(counts: tuple[int, ...]) -> DataLoader:
    """What all ranks have for each step."""
    by_rank = [torch.split(part, 2) if len(part) else () for part in torch.split(torch.arange(sum(counts)), counts)]
    steps = [
        torch.cat([batches[number] for batches in by_rank if number < len(batches)])
        for number in range(max(map(len, by_rank)))
    ]
    data = samples(sum(counts))
    batches = [tuple(part[indices] for part in data) for indices in steps]
    return DataLoader(batches, batch_size=None)


@case
def changes_of_steps(folder: str) -> Any:
    """What is kept after each batch, where the last ranks run out of data first, and where they do so last."""
    return {
        (name, counts): fit_changing(change, loader(*counts))[0]
        for name, change in CHANGES.items()
        for counts in (COUNTS, COUNTS[::-1])
    }


@case
def counters_of_samples(folder: str) -> Any:
    """The samples that each rank has counted; the last one never has any."""
    module = fit_changing(lambda module: None, loader(8, 4, 0))[1]
    return module.counted, len(module.seen)


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
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@case
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
    return nn.utils.parameters_to_vector(module.parameters()).detach(), module.steps.item()


@case
def optimizers_with_a_history(folder: str) -> Any:
    return {automatic: fit_with_history(automatic, loader(*COUNTS)) for automatic in (True, False)}

"""What the ranks of the tests of `ReplicaConsistency` run; one launch goes through a table of cases."""

import hashlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ddp_ext.callbacks import ReplicaConsistency
from lightning_ddp_ext.distributed.exchange import gather_objects
from lightning_ddp_ext.errors import ReplicaMismatchError
from tests.parity import CLASSES, FEATURES, dataset, quiet_trainer

STEPS = 6
ODD_RANK = 1


class Normalised(LightningModule):
    """A small network with batch normalisation."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.build, self.settings = optimizer, {"lr": 1e-2, **settings}
        self.first = nn.Linear(FEATURES, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return functional.cross_entropy(self.last(self.norm(self.first(batch[0])).relu()), batch[1])

    def configure_optimizers(self) -> Any:
        return self.build(self.parameters(), **self.settings)


class FrozenAtFirst(Normalised):
    """Thaws a layer that was frozen when torch's DDP wrapped the module: it never learns of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.first.requires_grad_(True)


class SteppingByHand(Normalised):
    """Manual optimization; rank 1 may leave out a step."""

    def __init__(self, left_out: int | None = None) -> None:
        super().__init__(torch.optim.SGD)
        self.automatic_optimization = False
        self.left_out = left_out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if not (batch_idx == self.left_out and self.global_rank == ODD_RANK):
            optimizer.step()


class WithTwoOptimizers(SteppingByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, other = self.optimizers()
        for optimizer in (one, other):
            optimizer.zero_grad()
        self.manual_backward(Normalised.training_step(self, batch, batch_idx))
        one.step()
        other.step()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.first.parameters(), lr=1e-2),
            torch.optim.SGD([*self.norm.parameters(), *self.last.parameters()], lr=1e-2, momentum=0.9),
        )


@dataclass
class Change(Callback):
    """Changes something on one rank after a batch, before replicas are compared."""

    change: Callable[[Any, torch.optim.Optimizer], None]
    everywhere: bool
    batch: int

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        if arguments[-1] == self.batch and (self.everywhere or trainer.global_rank == ODD_RANK):
            self.change(pl_module, trainer.optimizers[-1])


def flip_parameter(module: Any, optimizer: Any) -> None:
    module.first.weight.view(torch.int32)[1, 2] ^= 1


def negate_zero(module: Any, optimizer: Any) -> None:
    module.last.weight[1, 2] = -0.0 if module.global_rank == ODD_RANK else 0.0


def write_nan(module: Any, optimizer: Any) -> None:
    module.norm.bias[3] = torch.nan


def flip_buffer(module: Any, optimizer: Any) -> None:
    module.norm.running_var.view(torch.int32)[2] ^= 1


def count_one_more(module: Any, optimizer: Any) -> None:
    module.norm.num_batches_tracked += 1


def flip_exp_avg(module: Any, optimizer: Any) -> None:
    optimizer.state[module.first.bias]["exp_avg"].view(torch.int32)[0] ^= 1


def flip_momentum(module: Any, optimizer: Any) -> None:
    optimizer.state[module.last.bias]["momentum_buffer"].view(torch.int32)[0] ^= 1


def forget_state(module: Any, optimizer: Any) -> None:
    del optimizer.state[module.norm.weight]


def double_learning_rate(module: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 2


@dataclass
class Case:
    """One training, and what is changed on rank 1 in it, or on every rank."""

    module: Callable[[], LightningModule] = Normalised
    change: Callable[[Any, Any], None] | None = None
    everywhere: bool = False
    batch: int = 2
    same_data: bool = True
    compare: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What came of it on one rank."""

    message: str | None
    warnings: list[str]
    step: int
    comparisons: int
    seconds: float
    training_seconds: float
    equal: bool


EVERY = {"every_n_steps": 1, "buffers": True}


def adam() -> LightningModule:
    return Normalised()


def amsgrad() -> LightningModule:
    return Normalised(torch.optim.AdamW, amsgrad=True)


def momentum() -> LightningModule:
    return Normalised(torch.optim.SGD, momentum=0.9)


def plain_sgd() -> LightningModule:
    return Normalised(torch.optim.SGD)


def rmsprop() -> LightningModule:
    return Normalised(torch.optim.RMSprop, centered=True)


def lbfgs() -> LightningModule:
    return Normalised(torch.optim.LBFGS, max_iter=2)


def leave_out_a_step() -> LightningModule:
    return SteppingByHand(left_out=2)


CASES: dict[str, Case] = {
    "adam": Case(adam, options=EVERY),
    "amsgrad": Case(amsgrad, options=EVERY),
    "momentum": Case(momentum, options=EVERY),
    "sgd": Case(plain_sgd, options=EVERY),
    "rmsprop": Case(rmsprop, options=EVERY),
    "lbfgs": Case(lbfgs, options=EVERY),
    "own data, buffers by default": Case(same_data=False, options={"every_n_steps": 1}),
    "own data, buffers": Case(same_data=False, options=EVERY),
    "own data, buffers ignored": Case(same_data=False, options={**EVERY, "ignore": ["norm.running_*"]}),
    "two optimizers": Case(WithTwoOptimizers, options=EVERY),
    "parameter": Case(change=flip_parameter, options=EVERY),
    "zero": Case(change=negate_zero, everywhere=True, options=EVERY),
    "nan": Case(change=write_nan, options=EVERY),
    "buffer": Case(change=flip_buffer, options=EVERY),
    "count": Case(change=count_one_more, options=EVERY),
    "exp_avg": Case(change=flip_exp_avg, options=EVERY),
    "momentum_buffer": Case(momentum, change=flip_momentum, options=EVERY),
    "momentum of the second": Case(WithTwoOptimizers, change=flip_momentum, options=EVERY),
    "state": Case(change=forget_state, options=EVERY),
    "learning rate": Case(change=double_learning_rate, options=EVERY),
    "ignored": Case(change=flip_parameter, options={**EVERY, "ignore": ["first.*"]}, trainer={"max_steps": 3}),
    "thawed": Case(FrozenAtFirst, same_data=False, options={"every_n_steps": 1}),
    "step left out": Case(leave_out_a_step, options=EVERY),
    "by hand": Case(SteppingByHand, same_data=False, options={"every_n_steps": 2}),
    "warning": Case(change=flip_parameter, options={**EVERY, "on_difference": "warn"}),
    "every 2": Case(change=flip_parameter, options={**EVERY, "every_n_steps": 2}),
    "every 4": Case(options={**EVERY, "every_n_steps": 4}),
    "at the end": Case(change=flip_parameter, options={**EVERY, "every_n_steps": 100}),
    "accumulation": Case(
        options=EVERY, trainer={"accumulate_grad_batches": 2}
    ),
    "accumulation over two epochs, every 2": Case(
        options={**EVERY, "every_n_steps": 2}, trainer={"max_epochs": 2, "accumulate_grad_batches": 4}
    ),
    "unseen parameter": Case(change=flip_parameter, compare=False),
    "unseen state": Case(change=flip_exp_avg, batch=STEPS - 1, compare=False),
    "unseen thawing": Case(FrozenAtFirst, same_data=False, compare=False),
}  # fmt: skip


def train_all(names: list[str]) -> dict[str, Outcome]:
    """Train each case with Lightning's own `ddp`."""
    return {name: train_one(CASES[name]) for name in names}


def train_one(case: Case) -> Outcome:
    consistency = ReplicaConsistency(**case.options)
    callbacks: list[Callback] = [] if case.change is None else [Change(case.change, case.everywhere, case.batch)]
    trainer = quiet_trainer(
        DDPStrategy(process_group_backend="gloo"),
        **{
            "devices": _world_size(),
            "max_epochs": 1,
            "use_distributed_sampler": not case.same_data,
            "callbacks": [*callbacks, consistency] if case.compare else callbacks,
            **case.trainer,
        },
    )
    module = case.module()
    samples = 8 * STEPS * (1 if case.same_data else _world_size())
    message = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, DataLoader(dataset(samples, torch.float32), batch_size=8))
        except ReplicaMismatchError as error:
            message = str(error)
    return Outcome(
        message=message,
        warnings=[str(one.message) for one in caught if "replicas differ" in str(one.message)],
        step=trainer.global_step,
        comparisons=consistency.comparisons,
        seconds=consistency.seconds,
        training_seconds=consistency.training_seconds,
        equal=len(set(gather_objects(hash_state(module, trainer.optimizers)))) == 1,
    )


def hash_state(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> str:
    """Hash parameters and optimizer states in another way than what is tested."""
    tensors = [*module.parameters()]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            tensors += [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def _world_size() -> int:
    return int(os.environ["WORLD_SIZE"])

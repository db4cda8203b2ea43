"""Replicas that Lightning's `ddp` trains are compared; a difference of one rank is named."""

import hashlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy
from lightning_ddp_ext.callbacks import ReplicaConsistency, replica_consistency
from lightning_ddp_ext.consistency import hash_training_state, name_training_state
from lightning_ddp_ext.distributed.exchange import gather_objects
from lightning_ddp_ext.errors import ReplicaMismatchError
from tests.support.processes import run_processes
from tests.support.training import CLASSES, FEATURES, Classifier, batches, dataset, quiet_trainer

pytestmark = pytest.mark.timeout(300)
LAUNCHED = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}  # as torchrun does
STEPS = 6
ODD_RANK = 1


class Normalised(LightningModule):
    """A small network with batch normalisation."""

    def __init__(self, optimizer=torch.optim.Adam):
        super().__init__()
        torch.manual_seed(3)
        self.optimizer = optimizer
        self.first = nn.Linear(FEATURES, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, CLASSES)

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.last(self.norm(self.first(batch[0])).relu()), batch[1])

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=1e-2)


class FrozenAtFirst(Normalised):
    """Thaws a layer that was frozen when torch's DDP wrapped the module: it never learns of it."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.first.requires_grad_(True)


class SteppingByHand(Normalised):
    """Manual optimization; rank 1 may skip a step."""

    def __init__(self, skipped=None):
        super().__init__(torch.optim.SGD)
        self.automatic_optimization = False
        self.skipped = skipped

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if not (batch_idx == self.skipped and self.global_rank == ODD_RANK):
            optimizer.step()


@dataclass
class Change(Callback):
    """Changes something on one rank after the third batch, before replicas are compared."""

    change: Callable[[Any, Any], Any]

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2 and trainer.global_rank == ODD_RANK:
            self.change(pl_module, trainer.optimizers[0])


def flip(tensor, *index):
    """Flip the last bit of an element."""
    tensor.view(torch.int32)[index] ^= 1


CHANGES = {
    "parameter": lambda module, optimizer: flip(module.first.weight, 1, 2),
    "buffer": lambda module, optimizer: flip(module.norm.running_var, 2),
    "exp_avg": lambda module, optimizer: flip(optimizer.state[module.first.bias]["exp_avg"], 0),
    "state": lambda module, optimizer: optimizer.state.pop(module.norm.weight),
    "learning rate": lambda module, optimizer: optimizer.param_groups[0].update(lr=0.02),
}


@dataclass
class Case:
    """One training, and the change on rank 1; without options, replicas are not compared."""

    module: Callable[[], LightningModule] = Normalised
    change: str | None = None  # a key of `CHANGES`
    same_data: bool = True
    options: dict[str, Any] | None = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


EVERY = {"every_n_steps": 1, "buffers": True}
CASES = {
    "adam": Case(options=EVERY),
    "lbfgs": Case(lambda: Normalised(torch.optim.LBFGS), options=EVERY),
    "own data, buffers by default": Case(same_data=False, options={"every_n_steps": 1}),
    "own data, buffers": Case(same_data=False, options=EVERY),
    **{name: Case(change=name, options=EVERY) for name in CHANGES},
    "ignored": Case(change="parameter", options={**EVERY, "ignore": ["first.*"]}, trainer={"max_steps": 3}),
    "thawed": Case(FrozenAtFirst, same_data=False, options={"every_n_steps": 1}),
    "step skipped": Case(lambda: SteppingByHand(skipped=2), options=EVERY),
    "by hand": Case(SteppingByHand, same_data=False, options={"every_n_steps": 2}),
    "warning": Case(change="parameter", options={**EVERY, "on_difference": "warn"}),
    "every 2": Case(change="parameter", options={**EVERY, "every_n_steps": 2}),
    "at the end": Case(change="parameter", options={**EVERY, "every_n_steps": 100}),
    "accumulation over two epochs, every 2": Case(
        options={**EVERY, "every_n_steps": 2}, trainer={"max_epochs": 2, "accumulate_grad_batches": 4}
    ),
    "unseen parameter": Case(change="parameter", options=None),
    "unseen thawing": Case(FrozenAtFirst, same_data=False, options=None),
}  # fmt: skip


def train_all():
    """Train each case with Lightning's own `ddp`."""
    return {name: train_one(case) for name, case in CASES.items()}


def train_one(case):
    world_size = int(os.environ["WORLD_SIZE"])
    consistency = ReplicaConsistency(**(case.options or {}))
    callbacks = [Change(CHANGES[case.change])] if case.change else []
    callbacks += [] if case.options is None else [consistency]
    options = {"max_epochs": 1, "use_distributed_sampler": not case.same_data, "callbacks": callbacks, **case.trainer}
    trainer, module = quiet_trainer(DDPStrategy(), world_size, **options), case.module()
    data = dataset(8 * STEPS * (1 if case.same_data else world_size), torch.float32)
    message = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, DataLoader(data, batch_size=8))
        except ReplicaMismatchError as error:
            message = str(error)
    return SimpleNamespace(
        message=message,
        warnings=[str(one.message) for one in caught if "replicas differ" in str(one.message)],
        step=trainer.global_step,
        comparisons=consistency.comparisons,
        seconds=consistency.seconds,
        training_seconds=consistency.training_seconds,
        equal=len(set(gather_objects(hash_state(module, trainer.optimizers)))) == 1,
    )


def hash_state(module, optimizers):
    """Hash parameters and optimizer states in another way than the callback."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    values = [value for state in states for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    tensors = [tensor.detach().cpu().numpy().tobytes() for tensor in (*module.parameters(), *values)]
    return hashlib.sha256(b"".join(tensors)).hexdigest()


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def outcomes(request):
    """Return the outcomes of all ranks by case."""
    by_rank = run_processes(train_all, request.param, timeout=240, env=LAUNCHED)
    return {name: [outcome[name] for outcome in by_rank] for name in CASES}


def test_identical_replicas_raise_nothing(outcomes):
    for outcome in (*outcomes["adam"], *outcomes["lbfgs"], *outcomes["own data, buffers by default"]):
        assert (outcome.message, outcome.comparisons, outcome.equal) == (None, STEPS, True)
        assert 0 < outcome.seconds < outcome.training_seconds


FOUND = {
    "parameter": "parameter `first.weight`, float32 [4, 5], of rank 1 differs from {} by up to ",
    "buffer": "buffer `norm.running_var`, float32 [4], of rank 1 differs from {} by up to ",
    "exp_avg": "`exp_avg` of `first.bias` in optimizer 0, float32 [4], of rank 1 differs from {} by up to ",
    "state": "`exp_avg` of `norm.weight` in optimizer 0 is missing on rank 1, but float32 [4] on {} (3 of ",
    "learning rate": "`lr` of group 0 in optimizer 0, float64 [], of rank 1 differs from {} by up to 0.01 ",
}


def test_a_difference_of_one_rank_is_named(outcomes):
    for name, found in FOUND.items():
        others = "rank 0" if len(outcomes[name]) == 2 else "ranks 0, 2"
        start = f"replicas differ after step 3, unlike after step 2: {found.format(others)}"
        for outcome in outcomes[name]:
            assert outcome.message.startswith(start)
            assert (outcome.step, outcome.comparisons) == (3, 3)
            assert outcome.message == outcomes[name][0].message
    # One bit was flipped.
    assert 0 < float(outcomes["exp_avg"][0].message.split("by up to ")[1].split(" ")[0]) < 2**-22


def test_without_the_callback_training_ends_normally(outcomes):
    for outcome in (*outcomes["unseen parameter"], *outcomes["unseen thawing"]):
        assert (outcome.message, outcome.step, outcome.equal) == (None, STEPS, False)


def test_differences_that_ddp_allows_are_named(outcomes):
    for outcome in outcomes["thawed"]:
        assert outcome.message.startswith(
            "replicas differ after step 3, unlike after step 2: parameter `first.weight`, float32 [4, 5], of rank"
        )
        assert "Look for code that runs on one rank only" in outcome.message
    for outcome in outcomes["own data, buffers"]:
        assert outcome.message.startswith("replicas differ after step 1: buffer `norm.running_mean`, float32 [4], of ")
        assert outcome.message.endswith("exclude it with `ignore=['norm.running_mean']`.")
    for rank, outcome in enumerate(outcomes["step skipped"]):
        assert outcome.step == (2 if rank == 1 else 3)
        assert "parameter `first.weight`, float32 [4, 5], of rank 1 differs from" in outcome.message


def test_training_continues_after_a_warning(outcomes):
    first, *others = outcomes["warning"]
    assert len(first.warnings) == STEPS - 2
    assert first.warnings[0].startswith("replicas differ after step 3, unlike after step 2: parameter `first.weight`")
    for outcome in (first, *others):
        assert (outcome.message, outcome.step, outcome.comparisons) == (None, STEPS, STEPS)
    assert not any(outcome.warnings for outcome in others)


def test_replicas_are_compared_every_n_steps_and_in_the_end(outcomes):
    for name, comparisons, beginning in (
        ("every 2", 2, "replicas differ after step 4, unlike after step 2: parameter `first.weight`"),
        ("at the end", 1, "replicas differ after step 6: parameter `first.weight`"),
    ):
        for outcome in outcomes[name]:
            assert outcome.comparisons == comparisons
            assert outcome.message.startswith(beginning)
            assert outcome.message.endswith("Set `every_n_steps=1` to find the step of the first difference.")
    for name, steps, comparisons in (
        ("ignored", 3, 3),
        ("accumulation over two epochs, every 2", 4, 2),  # windows of 4 and 2 batches in each epoch
        ("by hand", 6, 3),
    ):
        for outcome in outcomes[name]:
            assert (outcome.message, outcome.step, outcome.comparisons) == (None, steps, comparisons)


def test_a_single_name_is_refused_with_the_list_to_write():
    with pytest.raises(TypeError, match=r"`ignore` must be a list of names, got 'norm\.\*'. Use \['norm"):
        ReplicaConsistency(ignore="norm.*")


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of `ddp` on CUDA
@pytest.mark.parametrize(
    ("make", "devices"),
    [(lambda: "auto", 1), (lambda: "ddp", 1), (BalancedDataParallelStrategy, 2)],
    ids=["one device", "ddp", "balanced_dp"],
)
def test_one_process_has_nothing_to_compare(make, devices, monkeypatch):
    printed = []
    monkeypatch.setattr(replica_consistency, "rank_zero_info", printed.append)
    consistency = ReplicaConsistency(every_n_steps=1)
    options = {"precision": "64-true", "max_epochs": 2, "limit_train_batches": 2}
    trainer, module = quiet_trainer(make(), devices, callbacks=[consistency], **options), Classifier()
    trainer.fit(module, batches())
    state = hash_training_state(module, trainer.optimizers)
    assert printed == [
        "ReplicaConsistency compares nothing: there is one process.",
        f"The training state after 4 optimizer steps has the SHA-256 {state}.",
    ]
    assert (consistency.comparisons, consistency.seconds) == (0, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_sharded_parameters_and_optimizers_are_recognised(group):
    trainer, module = SimpleNamespace(world_size=2, strategy=DDPStrategy()), Classifier()
    assert replica_consistency._why_not(trainer, module) is None
    for build in (FSDPStrategy, ModelParallelStrategy):
        reason = replica_consistency._why_not(SimpleNamespace(world_size=2, strategy=build()), module)
        assert reason == f"{build.__name__} keeps no whole replica on every rank"
    mesh = init_device_mesh("cpu", (1,))
    module.network[0].weight = nn.Parameter(distribute_tensor(module.network[0].weight.detach(), mesh))
    assert replica_consistency._why_not(trainer, module) == "parameters are sharded over ranks"
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns

    assert replica_consistency._is_sharded(ZeroRedundancyOptimizer([nn.Parameter(torch.ones(1))], torch.optim.SGD))


def stepped(build, **settings):
    module = nn.Linear(2, 3)
    optimizer = build(module.parameters(), lr=0.1, **settings)
    module(torch.randn(4, 2)).sum().backward()
    optimizer.step(lambda: torch.zeros(()))
    return module, optimizer


def test_every_kind_of_training_state_has_a_name():
    module, optimizer = stepped(torch.optim.SGD, momentum=0.9)
    state = name_training_state(module, [optimizer])
    assert [name for name in state if "group" not in name] == [
        *[f"parameter `{name}`" for name in ("weight", "bias")],
        *[f"`momentum_buffer` of `{name}` in optimizer 0" for name in ("weight", "bias")],
    ]
    assert state["`lr` of group 0 in optimizer 0"].item() == 0.1
    assert state["parameter `weight`"] is module.weight
    assert "`momentum_buffer` of `bias` in optimizer 1" in name_training_state(module, [optimizer, optimizer])
    # Parameters of another module.
    assert "`momentum_buffer` of `parameter 0 of group 0` in optimizer 0" in name_training_state(nn.ReLU(), [optimizer])
    name_training_state(module, [unused := torch.optim.Adam(module.parameters())])
    assert not unused.state  # not created by reading
    module, optimizer = stepped(torch.optim.LBFGS, max_iter=3)
    optimizer.state[module.weight]["old_dirs"] = [torch.ones(2)]
    state = name_training_state(module, [optimizer])
    assert state["`n_iter` of `weight` in optimizer 0"].dtype == torch.int64
    assert "`old_dirs[0]` of `weight` in optimizer 0" in state

"""Strategies of one process per device on two ranks with a virtual device each: numbers as on the CPU, exact resume."""

import os

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import BalancedDDPStrategy, ClassWeights, DDPCheckpointStrategy, DDPJoinStrategy
from lightning_ddp_ext._devices import widened, widest_float
from lightning_ddp_ext.batches import sample_counts
from lightning_ddp_ext.fabric.loop_strategy import _reduce_rows
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.strategies.toolkit import CLASSES, FEATURES, RANK, STRATEGIES, Classifier, fit, loader, samples
from tests.support.processes import run_processes

COUNTS = {"ddp_checkpoint": (8, 8), "ddp_join": (8, 4)}  # samples of each rank, in batches of two
# Ranks share batches of 8, 8 and 4 samples.
SHARED = {
    "balanced_ddp": {},
    "balanced_ddp, some shadow steps": {"split": [1, 3]},
    "balanced_ddp, shadow steps": {"gpu0_batch_size": 0},
}


class Network(Classifier):
    """A layer that only rank 0 uses in some steps, and logged values of the host and of the device."""

    def __init__(self, dropout=0.0):
        torch.manual_seed(1)
        super().__init__(lr=0.01)
        self.network = nn.Sequential(
            nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.Dropout(dropout), nn.Linear(7, CLASSES)
        )
        self.extra = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch, batch_idx):
        features = batch[0].float()
        logits = self.network(features)
        if batch_idx % 2 == 0 or self.global_rank == 0:
            logits = logits + self.extra(features)
        loss = functional.cross_entropy(logits, batch[1])
        self.log("loss", loss, sync_dist=True)
        self.log("smallest", logits.detach().min(), sync_dist=True, reduce_fx="min")
        self.log("features", features.detach().sum().cpu(), sync_dist=True, reduce_fx="sum")
        return loss


class SaveAfter(Callback):
    def __init__(self, steps, path):
        self.steps, self.path = steps, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path)


def train(strategy, dropout=0.0, kind=Network, **options):
    """Train two epochs on this rank; return the parameters, the buffers and the logged values."""
    torch.manual_seed(5 + RANK)
    module = kind(dropout)
    if strategy in SHARED:
        data = DataLoader(TensorDataset(*samples(20)), 8, shuffle=True)
        used = BalancedDDPStrategy(**SHARED[strategy])
    else:
        data, used = loader(*COUNTS[strategy]), strategy
    made, _ = fit(module, data, strategy=used, precision="32-true", max_epochs=2, **options)
    if os.environ["TESTS_ACCELERATOR"] == "virtual":
        from tests import virtual_accelerator

        virtual_accelerator.check()
    found = {name: value.tolist() for name, value in module.state_dict().items()}
    return found | {name: value.item() for name, value in made.callback_metrics.items()}


def interrupt_and_resume(strategy, path):
    """Train with dropout, without and with an interruption within an epoch; return both results."""
    whole = train(strategy, 0.5, callbacks=[SaveAfter(2, path)])
    return whole, train(strategy, 0.5, ckpt_path=path)


@pytest.mark.parametrize("strategy", [*STRATEGIES, *SHARED])
def test_devices_give_the_numbers_of_the_cpu_and_resume_with_the_same_dropout(virtual_devices, strategy, tmp_path):
    on_devices, on_cpus = (
        run_processes(train, 2, strategy, env={"TESTS_ACCELERATOR": accelerator}) for accelerator in ("virtual", "cpu")
    )
    assert on_devices[0] == on_devices[1]
    assert len(on_devices[0]) > 10
    for name, value in on_cpus[0].items():
        torch.testing.assert_close(torch.tensor(on_devices[0][name]), torch.tensor(value), rtol=1e-5, atol=1e-6)
    for whole, resumed in run_processes(interrupt_and_resume, 2, strategy, str(tmp_path / "saved.ckpt")):
        assert resumed == whole


def without_double_precision():
    """Synchronise buffers, the mean of logged values and of whole numbers, and read class weights of a device."""
    from tests import virtual_accelerator

    virtual_accelerator.load()
    device = torch.device("virtual", RANK)
    torch.accelerator.set_device_index(device)
    dist.init_process_group("cpu:gloo,virtual:virtual_ccl")
    with virtual_accelerator.WithoutDoublePrecision():
        return synchronize_values(device, virtual_accelerator.check)


def synchronize_values(device, check):
    assert widest_float(device) == torch.float32
    net = nn.BatchNorm1d(3)
    net.register_buffer("large", torch.tensor(0))
    net.to(device)
    reducer = GradientReducer(net)
    net.large.fill_(2**40 + 1)
    with reducer.synchronize(RANK + 1):
        net(torch.full((4, 3), 1.0 + RANK, device=device)).sum().backward()
    values = torch.full((2,), 1.0 + RANK, device=device)
    total, mean = sample_counts.sums_and_means(values, RANK + 1.0, lambda part: dist.all_reduce(part) or part)
    whole = widened(torch.full((1,), RANK, device=device), "mean")
    of_ranks = _reduce_rows(torch.tensor([[1], [2]], device=device), "mean")
    weight = ClassWeights(torch.ones(3, device=device))((None, torch.tensor([0, 2], device=device)))
    check()
    return (
        [*net.running_mean.tolist(), *mean.tolist()], net.large.item(), total.tolist(),
        [whole.tolist(), of_ranks.tolist(), weight],
    )  # fmt: skip


def test_devices_need_no_double_precision(virtual_devices):
    for rank, (means, large, total, others) in enumerate(run_processes(without_double_precision, 2)):
        assert means == pytest.approx([0.1 * 5 / 3] * 3 + [5 / 3] * 2, rel=1e-6)
        assert (large, total) == (2**40 + 1, [3.0] * 2)
        assert others == [[rank], [1.5], 2.0]


class SinglePrecision(Network):
    """Converts batches on the host."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0].float(), *batch[1:]]


def train_without_double_precision(strategy):
    from tests import virtual_accelerator

    virtual_accelerator.load()
    with virtual_accelerator.WithoutDoublePrecision():
        return train(strategy, kind=SinglePrecision)


@pytest.mark.parametrize("strategy", ["ddp_join", "balanced_ddp"])
def test_strategies_train_on_devices_without_double_precision(virtual_devices, strategy):
    limited, usual = (
        run_processes(job, 2, strategy, env={"TESTS_ACCELERATOR": "virtual"})
        for job in (train_without_double_precision, train)
    )
    assert limited[0] == limited[1]
    assert limited[0].keys() == usual[0].keys()
    for name, value in usual[0].items():
        torch.testing.assert_close(torch.tensor(limited[0][name]), torch.tensor(value), rtol=1e-5, atol=1e-6)


class Placed(Network):
    """Has its first layers on the rank's device and the other ones on another device."""

    def configure_model(self):
        if os.environ["TESTS_ACCELERATOR"] == "virtual":
            self.network[:3].to(f"virtual:{RANK}")
            self.network[3].to(f"virtual:{2 + RANK}")
            self.extra.to(f"virtual:{2 + RANK}")

    def training_step(self, batch, batch_idx):
        features = batch[0].float()
        last = self.network[3]
        logits = last(self.network[:3](features).to(last.weight.device))
        if batch_idx % 2 == 0 or self.global_rank == 0:
            logits = logits + self.extra(features.to(logits.device))
        loss = functional.cross_entropy(logits, batch[1].to(logits.device))
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_end(self):
        self.places = [str(parameter.device) for parameter in self.parameters()]


def train_placed(strategy):
    kinds = {"ddp_checkpoint": DDPCheckpointStrategy, "ddp_join": DDPJoinStrategy}
    torch.manual_seed(5 + RANK)
    module = Placed()
    data, used = loader(*COUNTS[strategy]), kinds[strategy](move_to_device=False)
    fit(module, data, strategy=used, precision="32-true", max_epochs=2)
    if os.environ["TESTS_ACCELERATOR"] == "virtual":
        from tests import virtual_accelerator

        virtual_accelerator.check()
    return module.places, {name: value.tolist() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_module_that_a_rank_has_placed_on_two_devices_trains_there_with_the_numbers_of_the_cpu(
    virtual_devices, strategy
):
    on_devices, on_cpus = (
        run_processes(train_placed, 2, strategy, env={"TESTS_ACCELERATOR": accelerator})
        for accelerator in ("virtual", "cpu")
    )
    for rank, (places, state) in enumerate(on_devices):
        assert places == [f"virtual:{rank}"] * 4 + [f"virtual:{2 + rank}"] * 4
        assert state == on_devices[0][1]
        for name, value in on_cpus[0][1].items():
            torch.testing.assert_close(torch.tensor(state[name]), torch.tensor(value), rtol=1e-5, atol=1e-6)

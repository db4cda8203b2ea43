"""`ddp_checkpoint` and `ddp_join` on two ranks with a virtual device each: the numbers of the CPU, and exact resume."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext.join import logged_values
from lightning_ddp_ext.ranks import sample_counts
from lightning_ddp_ext.reducer import buffer_synchronizer
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.parity import quiet_trainer
from tests.support.processes import run_processes

BATCHES = {"ddp_checkpoint": (4, 4), "ddp_join": (4, 2)}  # of each rank


class Network(LightningModule):
    """A layer that only rank 0 uses in some steps, and logged values of the host and of the device."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(dropout), nn.Linear(7, 3))
        self.extra = nn.Linear(5, 3)

    def training_step(self, batch, batch_idx):
        features, labels = batch
        logits = self.layers(features)
        if batch_idx % 2 == 0 or self.global_rank == 0:
            logits = logits + self.extra(features)
        loss = functional.cross_entropy(logits, labels)
        self.log("loss", loss, sync_dist=True)
        self.log("smallest", logits.detach().min(), sync_dist=True, reduce_fx="min")
        self.log("features", features.detach().sum().cpu(), sync_dist=True, reduce_fx="sum")
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class SaveAfter(Callback):
    def __init__(self, steps, path):
        self.steps, self.path = steps, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path)


def fit(accelerator, strategy, *callbacks, dropout=0.0, path=None):
    """Train two epochs on this rank; return the parameters, the buffers and the logged values."""
    rank = int(os.environ["RANK"])
    if accelerator == "virtual":
        from tests import virtual_accelerator

        virtual_accelerator.load()
    torch.manual_seed(5 + rank)
    size = 8 * BATCHES[strategy][rank]
    loader = DataLoader(TensorDataset(torch.randn(size, 5), torch.arange(size) % 3), batch_size=8)
    options = {"accelerator": accelerator, "max_epochs": 2, "use_distributed_sampler": False, "callbacks": [*callbacks]}
    module, trainer = Network(dropout), quiet_trainer(strategy, 2, **options)
    trainer.fit(module, loader, ckpt_path=path)
    found = {name: value.tolist() for name, value in module.state_dict().items()}
    if accelerator == "virtual":
        virtual_accelerator.check()
    return found | {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("strategy", BATCHES)
def test_devices_give_the_numbers_of_the_cpu(virtual_devices, strategy):
    on_devices, on_cpus = (
        run_processes(fit, 2, accelerator, strategy, env={"TESTS_ACCELERATOR": accelerator})
        for accelerator in ("virtual", "cpu")
    )
    assert on_devices[0] == on_devices[1]
    assert len(on_devices[0]) > 10
    for name, value in on_cpus[0].items():
        torch.testing.assert_close(torch.tensor(on_devices[0][name]), torch.tensor(value), rtol=1e-5, atol=1e-6)


def interrupt_and_resume(strategy, folder):
    """Train with dropout, without and with an interruption within an epoch; return both results."""
    path = str(Path(folder) / "saved.ckpt")
    whole = fit("virtual", strategy, SaveAfter(2, path), dropout=0.5)
    return whole, fit("virtual", strategy, dropout=0.5, path=path)


@pytest.mark.parametrize("strategy", BATCHES)
def test_dropout_of_a_resumed_run_is_the_same(virtual_devices, tmp_path, strategy):
    for whole, resumed in run_processes(interrupt_and_resume, 2, strategy, str(tmp_path)):
        assert resumed == whole


def without_double_precision():
    """Synchronise buffers, and the mean of logged values, on devices that compute in single precision only."""
    from tests import virtual_accelerator

    virtual_accelerator.load()
    rank, device = int(os.environ["RANK"]), torch.device("virtual", int(os.environ["RANK"]))
    for module in (buffer_synchronizer, logged_values, sample_counts):
        module.widest_float = lambda device: torch.float64 if device.type == "cpu" else torch.float32
    torch.accelerator.set_device_index(device)
    dist.init_process_group("cpu:gloo,virtual:virtual_ccl")
    net = nn.BatchNorm1d(3)
    net.register_buffer("large", torch.tensor(0))
    net.to(device)
    reducer = GradientReducer(net)
    net.large.fill_(2**40 + 1)
    with reducer.synchronize(rank + 1):
        net(torch.full((4, 3), 1.0 + rank, device=device)).sum().backward()
    values = torch.full((2,), 1.0 + rank, device=device)
    total, mean = sample_counts.sums_and_means(values, rank + 1.0, lambda part: dist.all_reduce(part) or part)
    virtual_accelerator.check()
    return net.running_mean.tolist(), net.large.item(), total.tolist(), [round(value, 6) for value in mean.tolist()]


def test_devices_need_no_double_precision(virtual_devices):
    mean = 5 / 3
    expected = [0.1 * mean] * 3, 2**40 + 1, [3.0] * 2, [round(mean, 6)] * 2
    for running_mean, *others in run_processes(without_double_precision, 2):
        assert running_mean == pytest.approx(expected[0], rel=1e-6)
        assert others == list(expected[1:])

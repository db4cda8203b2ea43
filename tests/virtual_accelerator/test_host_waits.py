"""Host waits, copies and bytes of one training step of each strategy; `pytest -rP` shows the table."""

import os
from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import BalancedDataParallelStrategy, BalancedDDPStrategy, DDPCheckpointStrategy, DDPJoinStrategy
from tests import virtual_accelerator
from tests.support.processes import run_processes
from tests.support.training import quiet_trainer

# Most host waits, copies and bytes of a step, without and with `self.log`. The first active rank of an uneven step
# waits to see whether the step has changed parameters, and for a value logged without `sync_dist`.
LIMITS = {
    "one device": [(0, 2, 224), (0, 2, 224)],
    "balanced_dp, 2 devices": [(0, 17, 1132), (0, 18, 1136)],
    "balanced_dp, 3 devices": [(0, 30, 1984), (0, 32, 1992)],
    "ddp_checkpoint": [(0, 2, 224), (0, 2, 224)],
    "ddp_join": [(0, 2, 224), (0, 2, 224)],
    "ddp_join, uneven step": [(1, 3, 230), (2, 3, 230)],
    "ddp_join, shadow step": [(0, 2, 224), (0, 2, 224)],
    "balanced_ddp": [(0, 2, 112), (0, 2, 112)],
    "balanced_ddp, shadow step": [(0, 2, 224), (0, 2, 224)],
}
STEPS = 8
WAYS = ["to the device", "to the host", "between devices"]


class Network(LightningModule):
    def __init__(self, logs):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Tanh(), nn.Linear(7, 3))
        self.logs = logs
        self.counts = []  # after each step

    def training_step(self, batch, batch_idx):
        features, labels = batch
        loss = functional.cross_entropy(self.layers(features), labels)
        if self.logs:
            self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        optimizer.register_step_post_hook(lambda *_: self.counts.append(virtual_accelerator.counts()))
        return optimizer


def train(strategy, devices, module, batches=STEPS):
    """Train one epoch, and return the module."""
    data = TensorDataset(torch.randn(8 * batches, 5), torch.arange(8 * batches) % 3)
    options = {"accelerator": "virtual", "max_epochs": 1, "use_distributed_sampler": False}
    quiet_trainer(strategy, devices, **options).fit(module, DataLoader(data, batch_size=8))
    virtual_accelerator.check()  # no race, and nothing freed in use
    assert len(module.counts) == STEPS
    return module


def added(counts):
    """Return what the steps after the first of these counts have added."""
    return {name: number - counts[0].get(name, 0) for name, number in counts[-1].items()}


def counts_of_a_step(strategy, devices, make, batches=STEPS):
    virtual_accelerator.load()
    return added(train(strategy, devices, make(), batches).counts[-2:])


def rank_counts(strategy, make, *batches):
    return counts_of_a_step(strategy, 2, make, batches[int(os.environ["RANK"])] if batches else STEPS)


def waits_of(counts):
    return sum(number for key, number in counts.items() if key.startswith("host waits:"))


def measure(logs):
    """Return the counts of a step for each name in `LIMITS`."""
    make, shared = partial(Network, logs), BalancedDDPStrategy(gpu0_batch_size=0)
    uneven = run_processes(rank_counts, 2, "ddp_join", make, STEPS, 5)
    return {
        "one device": counts_of_a_step(SingleDeviceStrategy("virtual:0"), 1, make),
        **{f"balanced_dp, {count} devices": counts_of_a_step("balanced_dp", count, make) for count in (2, 3)},
        **{name: run_processes(rank_counts, 2, name, make)[0] for name in ("ddp_checkpoint", "ddp_join")},
        "ddp_join, uneven step": uneven[0],
        "ddp_join, shadow step": uneven[1],
        "balanced_ddp": run_processes(rank_counts, 2, "balanced_ddp", make)[0],
        "balanced_ddp, shadow step": run_processes(rank_counts, 2, shared, make)[0],
    }


@pytest.mark.parametrize("logs", [False, True], ids=["without_logging", "with_logging"])
def test_a_training_step_waits_and_copies_no_more_than_allowed(virtual_devices, logs):
    found = measure(logs)
    columns = ["host waits", "kernels", *(f"{what} {way}" for way in WAYS for what in ("copies", "bytes"))]
    print(f"| one step, {'with' if logs else 'without'} `self.log` |", " | ".join(columns), "|")
    for name, counts in found.items():
        print(f"| {name} |", " | ".join(str(counts.get(column, 0)) for column in columns), "|")
    assert found.keys() == LIMITS.keys()
    assert all(counts["kernels"] > 0 for counts in found.values())
    for name, counts in found.items():
        totals = (
            sum(n for key, n in counts.items() if key.startswith(what)) for what in ("host waits:", "copies", "bytes")
        )
        assert all(total <= limit for total, limit in zip(totals, LIMITS[name][logs], strict=True)), (name, counts)


class Synchronised(Network):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, sync_dist=True)
        self.log("largest", loss, sync_dist=True, reduce_fx="max")
        return loss


class Gathering(Network):
    def training_step(self, batch, batch_idx):
        rows = self.layers(batch[0])[: 8 - int(os.environ["RANK"]) * self.logs]
        every = self.all_gather({"rows": rows, "mean": rows.mean()})
        assert every["rows"].shape == ((1, 15, 3) if self.logs else (2, 8, 3))
        return rows.square().mean() * every["rows"].mean() * every["mean"].sum()


@pytest.mark.parametrize(
    ("strategy", "make"),
    [
        *((strategy, partial(Synchronised, False)) for strategy in ("ddp_checkpoint", "ddp_join", "balanced_ddp")),
        *((strategy, partial(Gathering, False)) for strategy in ("ddp_checkpoint", "ddp_join")),
        *((strategy, partial(Gathering, True)) for strategy in ("ddp_checkpoint", "ddp_join")),
    ],
)
def test_logged_values_are_reduced_and_sizes_of_gathered_tensors_compared_without_a_wait(
    virtual_devices, strategy, make
):
    for counts in run_processes(rank_counts, 2, strategy, make):
        assert counts["kernels"] > 0
        assert waits_of(counts) == 0


PREFETCHING = {"ddp_checkpoint": DDPCheckpointStrategy, "ddp_join": DDPJoinStrategy}


class Overridden(Network):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        assert all(part.device.type == "cpu" for part in batch)
        return batch


def parameters_and_counts(make, devices, kind=Network, **options):
    """Train one epoch; return the parameters, the counts of the last steps, and the devices of the batches.

    `balanced_dp` compares parameters in the first three steps, for which the host waits.
    """
    virtual_accelerator.load()
    strategy, found = make(**options), []
    batch_to_device = strategy.batch_to_device

    def note(batch, *args, **kwargs):
        found.append(batch[0].device.type)
        return batch_to_device(batch, *args, **kwargs)

    strategy.batch_to_device = note
    module = train(strategy, devices, kind(False))
    return [parameter.tolist() for parameter in module.parameters()], added(module.counts[3:]), found


def prefetched_on_rank(name, kind, prefetch):
    torch.manual_seed(int(os.environ["RANK"]))
    return parameters_and_counts(PREFETCHING[name], 2, kind, prefetch=prefetch)


@pytest.mark.parametrize("kind", [Network, Overridden])
@pytest.mark.parametrize("name", PREFETCHING)
def test_prefetched_batches_are_copied_on_a_stream_of_their_own_without_a_wait(virtual_devices, name, kind):
    without = run_processes(prefetched_on_rank, 2, name, kind, 0)
    for found, (parameters, counts, _) in zip(
        run_processes(prefetched_on_rank, 2, name, kind, 2), without, strict=True
    ):
        assert found[0] == parameters
        assert waits_of(found[1]) == waits_of(counts) == 0
        assert counts["kernels"] > 0
        early = ["cpu"] * 2 + [("cpu" if kind is Overridden else "virtual")] * (STEPS - 2)
        assert found[2] == early


def test_chunks_of_prefetched_batches_are_copied_without_a_wait(virtual_devices):
    runs = []
    for prefetch in (0, 2):
        torch.manual_seed(0)
        runs.append(parameters_and_counts(BalancedDataParallelStrategy, 2, prefetch=prefetch, balance="even"))
    assert runs[0][0] == runs[1][0]
    assert [waits_of(counts) for _, counts, _ in runs] == [0, 0]
    assert runs[1][1]["copies to the device"] > 0

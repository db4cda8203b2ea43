"""Replicas on accelerators: generators, recomputation, transfers."""

import contextlib

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_ddp_ext._compat.torch import recompile_limit_of
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.replicas.replica import Replicas
from tests.support.training import FEATURES, balanced, dataset, quiet_trainer, seeded

virtual_accelerator = pytest.importorskip("tests.virtual_accelerator")


class Regression(LightningModule):
    def __init__(self, network=None):
        super().__init__()
        self.network = nn.Linear(FEATURES, 3) if network is None else network

    def training_step(self, batch, batch_idx):
        return self.network(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, devices, batches=4, **options):
    """Train on devices and return the parameters, on the CPU."""
    strategy = balanced(parallel_devices=devices, **options.pop("strategy", {}))
    trainer = quiet_trainer(strategy, len(devices), accelerator="virtual", max_epochs=1, **options)
    trainer.fit(module, DataLoader(dataset(8 * batches, torch.float32), batch_size=8))
    return [parameter.detach().cpu() for parameter in module.parameters()]


class Recomputed(Regression):
    """Recomputes layers with dropout, and keeps the masks of each pass."""

    def __init__(self, use_reentrant, draw):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.masks, self.use_reentrant, self.draw = [[]], use_reentrant, draw

    def on_train_batch_start(self, *args):
        self.masks[0].append({})

    def training_step(self, batch, batch_idx):
        masks = self.masks[0][-1]

        def dropped(index, layer, hidden):
            output = layer(hidden)
            mask = self.draw(output)
            masks.setdefault((len(batch[0]), index), []).append(mask.cpu())
            return output * mask.to(output)

        hidden = batch[0].requires_grad_()
        for index, layer in enumerate(self.layers):
            hidden = checkpoint(dropped, index, layer, hidden, use_reentrant=self.use_reentrant)
        return self.network(hidden).square().mean()


def draw_there(output):
    return torch.rand_like(output) > 0.5


def draw_on_the_host(output):
    return torch.rand(1) > 0.5


@pytest.mark.filterwarnings("ignore:`training_step` draws random numbers")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("draw", "indices"), [(draw_there, [0, 0]), (draw_on_the_host, [0, 0]), (draw_on_the_host, [0, 1])]
)
def test_recomputation_draws_the_masks_of_the_forward_pass_and_a_seed_reproduces_the_run(
    virtual_devices, use_reentrant, draw, indices
):
    def run():
        seed_everything(5, verbose=False)
        module = Recomputed(use_reentrant, draw)
        parameters = fit(module, [virtual_devices[index] for index in indices], 8, strategy={"split": [3, 5]})
        return parameters, module.masks[0]

    parameters, masks_of_steps = run()
    assert len(masks_of_steps) == 8
    for masks in masks_of_steps:
        assert len(masks) == 6  # three layers of two replicas
        assert all(len(passes) == 2 and torch.equal(*passes) for passes in masks.values())
    assert all(torch.equal(one, other) for one, other in zip(parameters, run()[0], strict=True))


class Mixed(nn.Module):
    """Has running statistics, weights in one piece of memory, and a buffer that does not change."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.recurrent = nn.LSTM(FEATURES, 3, batch_first=True)
        self.register_buffer("mask", torch.ones(FEATURES))

    def forward(self, inputs):
        return self.recurrent((self.norm(inputs) * self.mask).unsqueeze(1))[0]


class Logging(Regression):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, reduce_fx="max")
        self.log("on_host", torch.ones(()))
        self.log("on_one_device", loss if len(batch[0]) == 2 else 1.0)
        return loss


class WithoutWaits(Callback):
    """Raises an error where the host waits for a device, from the sixth batch on."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.context = virtual_accelerator.forbid_host_waits() if batch_idx >= 5 else contextlib.nullcontext()
        self.context.__enter__()

    def on_train_batch_end(self, *args):
        self.context.__exit__(None, None, None)


@pytest.mark.parametrize("balance", ["even", "auto"])
def test_the_host_does_not_wait_for_devices_in_a_training_step(virtual_devices, balance):
    options = {"strategy": {"balance": balance}, "callbacks": [WithoutWaits()]}
    fit(Logging(Mixed()), virtual_devices[:3], batches=8, **options)


def test_the_host_waits_once_in_a_step_for_all_batch_normalisation_in_compiled_code(virtual_devices):
    waits = []

    class Counting(Callback):
        def on_train_batch_start(self, *args):
            waits.append(-virtual_accelerator.counts().get("host waits", 0))

        def on_train_batch_end(self, *args):
            waits[-1] += virtual_accelerator.counts().get("host waits", 0)

    torch._dynamo.reset()
    network = nn.Sequential(*(nn.BatchNorm1d(FEATURES) for _ in range(4)), nn.Linear(FEATURES, 3))
    fit(Regression(torch.compile(network, backend="eager")), virtual_devices[:2], 8, callbacks=[Counting()])
    assert waits[5:] == [1, 1, 1]
    torch._dynamo.reset()


def test_the_current_device_is_the_one_of_the_chunk_in_the_transfer_hooks_and_the_step(virtual_devices):
    found = []

    class Watching(Regression):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            found.append(("transfer", device.index, torch.accelerator.current_device_index()))
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            found.append(("after", batch[0].device.index, torch.accelerator.current_device_index()))
            return batch

        def training_step(self, batch, batch_idx):
            found.append(("step", batch[0].device.index, torch.accelerator.current_device_index()))
            return super().training_step(batch, batch_idx)

    fit(Watching(), virtual_devices[:3], batches=2)
    assert {(hook, device) for hook, device, _ in found} == {
        (hook, index) for hook in ("transfer", "after", "step") for index in range(3)
    }
    assert all(device == current for _, device, current in found)


class Compiled(nn.Linear):
    """A class of its own, since Dynamo skips classes of torch."""

    def forward(self, inputs):
        return super().forward(inputs).tanh()


def test_code_is_compiled_for_every_device_under_a_low_limit(virtual_devices):
    torch._dynamo.reset()
    network = torch.compile(Compiled(FEATURES, 3), backend="eager", fullgraph=True)  # raises at the limit
    with recompile_limit_of(1):
        fit(Regression(network), virtual_devices)
    torch._dynamo.reset()


def test_replicas_train_on_devices_without_double_precision(virtual_devices):
    with virtual_accelerator.WithoutDoublePrecision():
        limited = fit(seeded(lambda: Logging(Mixed())), virtual_devices[:2])
    usual = fit(seeded(lambda: Logging(Mixed())), virtual_devices[:2])
    assert len(limited) == len(usual) > 4
    assert all(torch.equal(one, other) for one, other in zip(limited, usual, strict=True))


class Temperature(Regression):
    """Trains tensors beside the parameters of its modules."""

    def __init__(self, owner, make):
        super().__init__()
        self.__dict__.update({owner: make(torch.ones(FEATURES, device="virtual:0"))})

    def trained(self):
        (tensor,) = vars(self).get("nested", {"plain": (vars(self).get("scale"),)})["plain"]
        return tensor

    def training_step(self, batch, batch_idx):
        return (self.network(batch[0]) * self.trained().sum()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), self.trained()], lr=0.1)


@pytest.mark.parametrize(
    ("owner", "make", "name"),
    [
        ("scale", lambda tensor: tensor.requires_grad_(), "scale"),
        ("nested", lambda tensor: {"plain": (nn.Parameter(tensor),)}, "nested"),
    ],
)
def test_trained_tensors_that_are_no_parameters_are_refused_on_several_devices(virtual_devices, owner, make, name):
    message = f"`self.{name}` holds a tensor that `SGD` trains.*`nn.Parameter`"
    with pytest.raises(UnsupportedFeatureError, match=message):
        fit(Temperature(owner, make), virtual_devices[:2])


def test_trained_tensors_that_are_no_parameters_are_shared_on_one_device(virtual_devices):
    found = []
    for devices in (virtual_devices[:1], virtual_devices[:1] * 2):
        torch.manual_seed(0)
        module = Temperature("scale", lambda tensor: tensor.requires_grad_())
        fit(module, devices)
        found.append(module.scale.detach().cpu())
    torch.testing.assert_close(*found)


class Evaluated(Regression):
    """Has a buffer, and counts what a batch of its evaluation does; no result has to come back from the devices."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(FEATURES))
        self.counts = []

    def test_step(self, batch, batch_idx):
        self.network(batch[0] * self.mask)

    def on_test_batch_start(self, *args):
        self.counts.append(virtual_accelerator.counts())

    def on_test_batch_end(self, *args):
        before = self.counts[-1]
        self.counts[-1] = {name: number - before.get(name, 0) for name, number in virtual_accelerator.counts().items()}


def test_parameters_and_buffers_are_not_sent_in_every_batch_of_an_evaluation(virtual_devices):
    module = Evaluated()
    trainer = quiet_trainer(balanced(parallel_devices=virtual_devices[:3]), 3, accelerator="virtual")
    trainer.test(module, DataLoader(dataset(40, torch.float32), batch_size=8), verbose=False)
    assert len(module.counts) == 5
    assert module.counts[0]["bytes between devices"] > 0
    for counts in module.counts[2:]:
        assert counts["bytes to the device"] > 0
        assert counts["bytes between devices"] == 0
        assert counts.get("host waits", 0) == 0


def test_parameters_are_concatenated_once_for_all_devices(virtual_devices, monkeypatch):
    replicas = Replicas(nn.Linear(FEATURES, 3, device=virtual_devices[0]), virtual_devices[:3])
    replicas.refresh()
    concatenated, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors, *args: concatenated.append(len(tensors)) or cat(tensors, *args))
    before = virtual_accelerator.counts()["copies between devices"]
    replicas.refresh()
    assert concatenated == [2]
    assert virtual_accelerator.counts()["copies between devices"] - before == 2

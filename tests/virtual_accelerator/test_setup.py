"""The devices in other processes, and training on them."""

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from tests import virtual_accelerator
from tests.conftest import skip
from tests.support.processes import run_processes
from tests.support.training import (
    Classifier,
    Trained,
    balanced,
    batches,
    flat_gradient,
    quiet_trainer,
    relative_difference,
    seeded,
)
from tests.virtual_accelerator import build


def loaded_rank():
    virtual_accelerator.load()
    (torch.ones(3, device="virtual:1", requires_grad=True) * 2).sum().backward()
    return torch.accelerator.current_accelerator().type


def test_a_rank_loads_the_devices_and_its_parent_stays_as_it_was():
    try:
        build.built_library()  # here, since it takes longer than a rank may
    except build.NoCompilerError as error:
        skip(str(error))
    before = torch.accelerator.current_accelerator()
    assert run_processes(loaded_rank, 1) == ["virtual"]
    assert torch.accelerator.current_accelerator() == before


def test_balanced_dp_trains_as_one_cpu(virtual_devices):
    modules = [seeded(Classifier), seeded(Classifier)]
    options = {"max_epochs": 2, "precision": "64-true"}
    quiet_trainer(SingleDeviceStrategy(torch.device("cpu")), 1, accelerator="cpu", **options).fit(modules[0], batches())
    quiet_trainer(balanced([2, 3, 3]), 3, **options).fit(modules[1], batches())
    assert virtual_accelerator.counts()["copies between devices"] > 0
    single, parallel = ([parameter.detach().cpu() for parameter in module.parameters()] for module in modules)
    assert relative_difference(parallel, single) < 1e-12


def test_tensors_of_different_devices_are_compared_on_the_cpu(virtual_devices):
    layers = nn.ModuleList([nn.Linear(2, 1, device=device) for device in virtual_devices[:2]])
    for layer in layers:
        layer(torch.ones_like(layer.weight)).sum().backward()
    assert flat_gradient(layers).tolist() == [1] * 6
    parameters = [*layers.parameters()]
    assert relative_difference(parameters, [parameter.detach().cpu() for parameter in parameters]) == 0
    assert {parameter.device for parameter in Trained(layers, None, None).parameters} == {torch.device("cpu")}

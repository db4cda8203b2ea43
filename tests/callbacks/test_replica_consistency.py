"""Arguments of `ReplicaConsistency`, runs without replicas to compare, and names of the compared values."""

import logging
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from lightning_ddp_ext import BalancedDataParallelStrategy
from lightning_ddp_ext.callbacks import ReplicaConsistency, replica_consistency
from lightning_ddp_ext.consistency.replica_differences import name_training_state
from tests.parity import Classifier, batches, quiet_trainer


@pytest.fixture
def said(caplog):
    """Return what the callback has said."""
    # Lightning's loggers do not pass their records on, and the tests' are quiet.
    logger = logging.getLogger("lightning.pytorch")
    logger.setLevel(logging.INFO)
    logger.addHandler(caplog.handler)
    yield lambda: [record.message for record in caplog.records if "ReplicaConsistency" in record.message]
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every_n_steps": 0}, ValueError, "`every_n_steps` must be at least 1, got 0"),
        ({"on_difference": "ignore"}, ValueError, "`on_difference` must be one of 'raise', 'warn', got 'ignore'"),
        ({"ignore": "norm.*"}, TypeError, r"`ignore` must be a list of names, got 'norm\.\*'"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        ReplicaConsistency(**options)


@pytest.mark.parametrize(
    ("strategy", "devices"), [("auto", 1), ("ddp", 1), (BalancedDataParallelStrategy(), 2)], ids=str
)
def test_one_process_has_nothing_to_compare_and_is_told_so_once(strategy, devices, said):
    consistency = ReplicaConsistency(every_n_steps=1)
    trainer = quiet_trainer(
        strategy, devices, precision="64-true", max_epochs=2, callbacks=[consistency], limit_train_batches=2
    )
    trainer.fit(Classifier(), batches())
    assert said() == ["ReplicaConsistency compares nothing: there is one process."]
    assert (consistency.comparisons, consistency.seconds) == (0, 0)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_sharded_parameters_and_optimizers_are_recognised(group):
    trainer = SimpleNamespace(world_size=2, strategy=DDPStrategy())
    module = Classifier()
    assert replica_consistency._why_not(trainer, module) is None
    for build in (FSDPStrategy, ModelParallelStrategy):
        reason = replica_consistency._why_not(SimpleNamespace(world_size=2, strategy=build()), module)
        assert reason == f"{build.__name__} keeps no whole replica on every rank"
    mesh = init_device_mesh("cpu", (1,))
    module.network[0].weight = nn.Parameter(distribute_tensor(module.network[0].weight.detach(), mesh))
    assert replica_consistency._why_not(trainer, module) == "parameters are sharded over ranks"
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns

    assert replica_consistency._is_sharded(ZeroRedundancyOptimizer([nn.Parameter(torch.ones(1))], torch.optim.SGD))
    assert not replica_consistency._is_sharded(torch.optim.SGD([nn.Parameter(torch.ones(1))]))


def stepped(build, **settings):
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = build(module.parameters(), lr=0.1, **settings)
    module(torch.randn(4, 2)).sum().backward()
    optimizer.step(lambda: torch.zeros(()))
    return module, optimizer


def test_the_state_of_a_training_has_names():
    module, optimizer = stepped(torch.optim.SGD, momentum=0.9)
    state = name_training_state(module, [optimizer])
    parameters = ["0.weight", "0.bias", "1.weight", "1.bias"]
    buffers = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert [name for name in state if "group" not in name] == [
        *[f"parameter `{name}`" for name in parameters],
        *[f"buffer `{name}`" for name in buffers],
        *[f"`momentum_buffer` of `{name}` in optimizer 0" for name in parameters],
    ]
    assert state["`lr` of group 0 in optimizer 0"].item() == 0.1
    assert "`momentum_buffer` of `0.bias` in optimizer 1" in name_training_state(module, [optimizer, optimizer])
    assert state["parameter `0.weight`"] is module[0].weight


def test_buffers_and_names_can_be_left_out():
    module, optimizer = stepped(torch.optim.Adam)
    assert len(name_training_state(module, [unused := torch.optim.Adam(module.parameters())])) > 4
    assert not unused.state
    state = name_training_state(module, [optimizer], buffers=False, ignore=["0.*"])
    assert {name.split("`")[-2] for name in state if "group" not in name} == {"1.weight", "1.bias"}


def test_lists_and_numbers_in_the_state_of_an_optimizer_count():
    module, optimizer = stepped(torch.optim.LBFGS, max_iter=3)
    state = name_training_state(module, [optimizer])
    assert state["`n_iter` of `0.weight` in optimizer 0"].dtype == torch.int64
    optimizer.state[module[0].weight]["old_dirs"] = [torch.ones(2)]
    assert "`old_dirs[0]` of `0.weight` in optimizer 0" in name_training_state(module, [optimizer])


def test_parameters_that_are_not_the_modules_have_a_name():
    own = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([own], lr=0.1, momentum=0.9)
    own.sum().backward()
    optimizer.step()
    names = list(name_training_state(nn.Linear(1, 1), [optimizer]))
    assert "`momentum_buffer` of `parameter 0 of group 0` in optimizer 0" in names

"""Gradients on real devices: NCCL, shared devices, uneven ranks, replicas, recurrent and convolutional networks."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_ddp_ext.consistency.fingerprints import fingerprint, fingerprint_all
from tests.gpu.training import RANKED, STRATEGIES, Regression, Task, difference, mlp, rows, train, train_alone
from tests.support import devices

NET = partial(Regression, mlp)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


PLAIN = partial(Regression, plain)


@pytest.mark.parametrize("name", RANKED)
def test_one_rank_equals_one_device(name, record_property):
    task = Task(NET, sizes=((3, 5, 2),))
    (found,) = train(name, task)
    record_property("backend", found.backend)
    assert found.backend == devices.backend(1)
    assert difference(found, train_alone(task)) < devices.tolerance()


@pytest.mark.parametrize("name", RANKED)
def test_two_ranks_equal_one_device(name, record_property):
    task = Task(PLAIN)
    first, second = train(name, task)
    record_property("backend", first.backend)
    assert first.digest == second.digest
    assert difference(first, train_alone(task)) < devices.tolerance()


@pytest.mark.parametrize("weight_by", ["samples", "equal"])
def test_ranks_that_run_out_of_data_join_with_shadow_steps(weight_by):
    task = Task(PLAIN, sizes=((3, 5, 2, 4), (6, 1), (2,)), strategy={"weight_by": weight_by})
    ended = train("ddp_join", task)
    assert len({end.digest for end in ended}) == 1
    assert [len(end.gradients) for end in ended] == [4, 4, 4]
    is_exact = difference(ended[0], train_alone(task)) < devices.tolerance()
    assert is_exact == (weight_by == "samples")  # equal weights are the negative control


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("options", [{}, {"gpu0_batch_size": 0}, {"gpu0_batch_size": 1}], ids=repr)
def test_replicas_equal_one_device(replicas, options):
    task = Task(PLAIN, sizes=((9, 8, 12),) + ((),) * (replicas - 1), strategy=options)
    (found,) = train("balanced_dp", task)
    assert difference(found, train_alone(task)) < devices.tolerance()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 8)

    def forward(self, inputs):
        return self.head(self.lstm(inputs)[0])


@pytest.mark.filterwarnings("error:RNN module weights")
@pytest.mark.parametrize("name", STRATEGIES)
def test_recurrent_networks(name):
    """cuDNN warns if the weights of a replica are not one piece of memory."""
    task = Task(partial(Regression, Recurrent), batch=partial(rows, shape=(5, 8)))
    ended = train(name, task)
    assert len({end.digest for end in ended}) == 1
    assert difference(ended[0], train_alone(task)) < devices.tolerance()


@pytest.mark.parametrize(
    ("name", "options"), [*[(name, {}) for name in STRATEGIES], ("balanced_dp", {"gpu0_batch_size": 0})]
)
def test_channels_last_with_a_fused_optimizer(name, options):
    """The optimizer refuses gradients whose memory format is not the weights'."""
    task = Task(
        partial(Regression, conv, partial(torch.optim.Adam, lr=1e-3, fused=True)),
        batch=partial(rows, shape=(4, 8, 8)),
        strategy=options,
    )
    ended = train(name, task)
    assert len({end.digest for end in ended}) == 1
    assert difference(ended[0], train_alone(task)) < max(devices.tolerance(), 1e-9)  # of Adam's first steps


def conv() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    return layers.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
)
def test_fingerprints_of_tensors_on_the_device(dtype):
    tensor = torch.randn(100_003, generator=torch.Generator().manual_seed(1)).mul(50).to(dtype).to(devices.device())
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    changed = tensor.clone()
    changed[77_777] = not changed[77_777] if dtype == torch.bool else changed[77_777] + 1
    assert fingerprint(changed) != fingerprint(tensor)
    pair = {"a": tensor, "b": tensor[:5]}
    assert fingerprint_all(pair) == fingerprint_all({name: part.clone() for name, part in pair.items()})

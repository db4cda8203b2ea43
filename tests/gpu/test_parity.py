"""Gradients on real devices: NCCL, recurrent networks, and memory formats of convolutional ones."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from tests.gpu.training import RANKED, STRATEGIES, Regression, Task, difference, mlp, rows, train, train_alone
from tests.support import devices


@pytest.mark.parametrize("name", RANKED)
def test_one_rank_equals_one_device(name, record_property):
    task = Task(partial(Regression, mlp), sizes=((3, 5, 2),))
    (found,) = train(name, task)
    record_property("backend", found.backend)
    assert found.backend == devices.backend(1)
    assert difference(found, train_alone(task)) < devices.tolerance()


@pytest.mark.parametrize("is_synced", [True, False])
@pytest.mark.parametrize("name", RANKED)
def test_batch_normalisation_over_ranks(needs_cuda, name, is_synced):
    """Two ranks with unequal shares share the GPU; without synchronisation, the negative control, they differ."""
    task = Task(partial(Regression, mlp), sizes=((3, 5, 2), (7, 2, 4)), trainer={"sync_batchnorm": is_synced})
    ended = train(name, task)
    found = difference(ended[0], train_alone(replace(task, trainer={})))
    assert found < devices.tolerance() if is_synced else found > 1e-3


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

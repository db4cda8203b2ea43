import pytest
import torch
from torch import nn

from lightning_ddp_ext.reducer.buffer_synchronizer import same_values
from lightning_ddp_ext.replicas import buffer_merger
from lightning_ddp_ext.replicas import replica as replica_module
from lightning_ddp_ext.replicas.buffer_merger import BufferMerger
from lightning_ddp_ext.replicas.replica import Replica
from tests.replicas.test_replicas import replicate

pytestmark = pytest.mark.usefixtures("tensors_on_device")


def module_with(**buffers):
    net = nn.Module()
    for name, value in buffers.items():
        net.register_buffer(name, value)
    return net


def test_unchanged_buffers_keep_every_bit():
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0])
    net = module_with(table=torch.cat([torch.rand(50) / 3, special]))
    before = net.table.clone()
    BufferMerger(replicate(net, 3)).merge([0, 1, 2], [1, 2, 4])
    assert net.table.cpu().numpy().tobytes() == before.cpu().numpy().tobytes()


@pytest.mark.parametrize(("values", "mean"), [((2.0, 6.0), 5.0), ((1 + 1j, 5 - 3j), 4 - 2j)])
def test_changed_elements_become_the_mean_and_others_keep_infinities(values, mean):
    net = module_with(state=torch.tensor([float("-inf"), 1.0], dtype=torch.tensor(mean).dtype))
    replicas = replicate(net)
    for replica, value in zip(replicas, values, strict=True):
        replica.module.state[1] = value
    with pytest.warns(UserWarning, match="`state` was changed differently .* keeps their mean by samples"):
        BufferMerger(replicas).merge([0, 1], [1, 3])
    assert net.state.tolist() == [float("-inf"), mean]


@pytest.mark.parametrize("sizes", [(2, 6), (4, 4)])
def test_counts_of_samples_are_warned_about_once_and_counts_of_steps_are_not(sizes):
    net = nn.Sequential(module_with(count=torch.zeros((), dtype=torch.int64), steps=torch.zeros(1), none=None))
    replicas = replicate(net)
    merger = BufferMerger(replicas)
    for replica, size in zip(replicas, sizes, strict=True):
        replica.module[0].count += size
        replica.module[0].steps += 1
    with pytest.warns(UserWarning, match=r"buffer `0.count` .* keeps the buffer of the first replica"):
        merger.merge([0, 1], sizes)
    assert (net[0].count, net[0].steps) == (sizes[0], 1)
    merger.merge([0, 1], sizes)


def test_buffers_may_be_created_dropped_and_resized_in_a_step():
    net = module_with(dropped=torch.ones(2), resized=torch.ones(2))
    replicas = replicate(net)
    for replica in replicas:
        replica.module.dropped = None
        replica.module.resized = torch.zeros(3)
        replica.module.register_buffer("created", torch.ones(1))
    BufferMerger(replicas).merge([0, 1], [1, 1])
    assert net.dropped is None
    assert net.resized.shape == (3,)
    assert "created" in net.state_dict()


def test_without_the_first_replica_its_buffers_follow_the_others():
    net = nn.BatchNorm1d(2)
    replicas = replicate(net)
    replicas[1].module(torch.full((4, 2), 10.0))
    BufferMerger(replicas).merge([1], [4])
    assert torch.allclose(net.running_mean, torch.full((2,), 1.0))
    assert net.num_batches_tracked == 1


@pytest.fixture
def calls(monkeypatch):
    """Comparisons of buffers and their transfers to replicas, in order."""
    called, receive = [], Replica.receive_buffers
    for module in (buffer_merger, replica_module):
        monkeypatch.setattr(module, "same_values", lambda *args: called.append("compare") or same_values(*args))
    monkeypatch.setattr(Replica, "receive_buffers", lambda *args: called.append("send") or receive(*args))
    return called


def step(replicas, merger, change=lambda module: None, name="training_step"):
    replicas.refresh(name)
    for one in replicas:
        change(one.module)
    merger.merge([0, 1], [4, 4])


def test_buffers_that_do_not_change_are_neither_compared_nor_sent_after_the_first_steps(calls):
    net = nn.ModuleList([module_with(mask=torch.ones(4), none=None), nn.BatchNorm1d(2).eval()])
    replicas = replicate(net)
    merger = BufferMerger(replicas)
    for _ in range(3):
        step(replicas, merger)
    assert set(calls) == {"compare"}
    calls.clear()
    for name in ("training_step", "validation_step", "validation_step", "training_step"):
        step(replicas, merger, name=name)
    assert calls == []
    net[0].mask[1] = 5
    step(replicas, merger)
    assert calls == ["send"] * 2
    step(replicas, merger, lambda module: module[0].mask.mul_(2))
    assert net[0].mask.tolist() == [2, 10, 2, 2]
    assert all(torch.equal(one.module[0].mask, net[0].mask) for one in replicas)
    replicas[1].module[0].mask.zero_()  # outside of any step
    step(replicas, merger)
    assert replicas[1].module[0].mask.tolist() == [2, 10, 2, 2]


def test_buffers_that_change_through_data_in_the_first_steps_are_compared_and_sent_in_all():
    net = module_with(in_step=torch.zeros(2), in_hook=torch.zeros(2))
    replicas = replicate(net)
    merger = BufferMerger(replicas)
    for number in range(1, 8):
        step(replicas, merger, lambda module: module.in_step.data.add_(1))
        assert net.in_step.tolist() == [number] * 2
        assert replicas[1].module.in_hook.tolist() == [number - 1] * 2
        net.in_hook.data.add_(1)

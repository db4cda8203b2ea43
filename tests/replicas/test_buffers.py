import pytest
import torch
from torch import nn

from lightning_ddp_ext.replicas.buffers import BufferMerger
from lightning_ddp_ext.replicas.replica import Replicas

CPU = torch.device("cpu")


def replicate(module, count=2):
    replicas = Replicas(module, [CPU] * count)
    replicas.refresh()
    return replicas


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
    assert net.table.numpy().tobytes() == before.numpy().tobytes()


@pytest.mark.parametrize(("values", "mean"), [((2.0, 6.0), 5.0), ((1 + 1j, 5 - 3j), 4 - 2j)])
def test_changed_elements_become_the_mean_and_others_keep_infinities(values, mean):
    net = module_with(state=torch.tensor([float("-inf"), 1.0], dtype=torch.tensor(mean).dtype))
    replicas = replicate(net)
    for replica, value in zip(replicas, values, strict=True):
        replica.module.state[1] = value
    with pytest.warns(UserWarning, match="`state` was changed differently .* keeps their mean by samples"):
        BufferMerger(replicas).merge([0, 1], [1, 3])
    assert net.state.tolist() == [float("-inf"), mean]


@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_counts_of_samples_are_added_up(kind):
    net = module_with(seen=torch.zeros(1, dtype=kind), none=None, steps=torch.zeros((), dtype=kind))
    replicas = replicate(net)
    merger = BufferMerger(replicas)
    for sizes in ((4, 4), (5, 2), (1, 1)):
        replicas.refresh()
        for replica, size in zip(replicas, sizes, strict=True):
            replica.module.seen += size
            replica.module.steps += 1
        merger.merge([0, 1], sizes)
    assert net.seen.tolist() == [17]
    assert net.steps == 3


def test_the_place_in_a_queue_is_not_added_up():
    net = module_with(queue=torch.zeros(64), place=torch.tensor([56]))
    replicas = replicate(net)
    for replica in replicas:
        replica.module.place += 4
    BufferMerger(replicas).merge([0, 1], [4, 4])
    assert net.place.tolist() == [60]


def test_counts_that_two_modules_share_are_added_up_once():
    seen = torch.zeros(1)
    net = nn.Sequential(module_with(seen=seen), module_with(seen=seen))
    replicas = replicate(net)
    for replica in replicas:
        replica.module[0].seen += 4
    BufferMerger(replicas).merge([0, 1], [4, 4])
    assert net[1].seen is net[0].seen
    assert net[0].seen.tolist() == [8]


def test_counts_in_buffers_are_warned_about_once():
    net = nn.Sequential(module_with(count=torch.zeros((), dtype=torch.int64)))
    replicas = replicate(net)
    merger = BufferMerger(replicas)
    replicas[0].module[0].count += 3
    replicas[1].module[0].count += 6
    with pytest.warns(UserWarning, match=r"buffer `0.count` .* keeps the buffer of the first replica"):
        merger.merge([0, 1], [2, 6])
    assert net[0].count == 3
    merger.merge([0, 1], [2, 6])


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

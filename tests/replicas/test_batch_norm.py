"""Running statistics equal those of one device that sees the whole batch."""

import copy

import pytest
import torch
from torch import nn

from lightning_ddp_ext.replicas.buffers import BatchNormObserver, BufferMerger
from lightning_ddp_ext.replicas.replica import Replicas

CPU = torch.device("cpu")


def train(net, sizes, batches, observed=True):
    """Run batches cut into chunks, and merge after each."""
    replicas = Replicas(net, [CPU] * len(sizes))
    replicas.refresh()
    observer, merger = BatchNormObserver(replicas), BufferMerger(replicas)
    active = [index for index, size in enumerate(sizes) if size]
    for batch in batches:
        replicas.refresh()
        observer.forget()
        for index, chunk in zip(range(len(sizes)), batch.split(sizes), strict=True):
            if index in active:
                replicas[index].module(chunk)
        merged = observer.merge(active, [sizes[index] for index in active]) if observed else set()
        merger.merge(active, [sizes[index] for index in active], merged)


def batches(*shape):
    generator = torch.Generator().manual_seed(2)
    drift = torch.arange(shape[0], dtype=torch.float64).reshape(-1, *[1] * (len(shape) - 1))
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) * 2 + drift for _ in range(3)]


def difference(net, reference):
    pairs = zip(net.buffers(), reference.buffers(), strict=True)
    return max(float((one - other).abs().max() / other.abs().max().clamp_min(1e-9)) for one, other in pairs)


@pytest.mark.parametrize("sizes", [[4, 4], [2, 6], [0, 8], [3, 0, 5], [2, 2, 4]])
@pytest.mark.parametrize("momentum", [0.1, 1.0, None, 0.0])
@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.BatchNorm1d, (8, 3)), (nn.BatchNorm1d, (8, 3, 4)), (nn.BatchNorm2d, (8, 3, 2, 2))]
)
def test_statistics_of_one_layer_are_those_of_the_whole_batch(layer, shape, momentum, sizes):
    net = layer(3, momentum=momentum, dtype=torch.float64)
    reference = copy.deepcopy(net)
    train(net, sizes, batches(*shape))
    for batch in batches(*shape):
        reference(batch)
    assert difference(net, reference) < 1e-12
    assert net.num_batches_tracked == 3


def test_the_test_fails_without_the_variance_between_chunks():
    net = nn.BatchNorm1d(3, dtype=torch.float64)
    reference = copy.deepcopy(net)
    with pytest.warns(UserWarning, match="was changed differently") as warned:
        train(net, [2, 6], batches(8, 3), observed=False)
    assert len(warned) == 2  # mean and variance, once each
    for batch in batches(8, 3):
        reference(batch)
    torch.testing.assert_close(net.running_mean, reference.running_mean)
    assert difference(net, reference) > 0.05


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_layer_may_be_called_several_times_in_a_step(momentum):
    # Not one call behind another: what a layer returns depends on the chunk, what it is given here does not.
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64)

        def forward(self, inputs):
            self.norm(inputs)
            self.norm(inputs.square())
            return self.norm(inputs - 5)

    net = Twice()
    reference = copy.deepcopy(net)
    train(net, [2, 6], batches(8, 3))
    for batch in batches(8, 3):
        reference(batch)
    assert difference(net, reference) < 1e-12
    assert net.norm.num_batches_tracked == 9


def test_a_call_that_only_some_replicas_make_counts_their_values():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3, dtype=torch.float64)

        def forward(self, inputs):
            self.norm(inputs)
            if len(inputs) > 2:
                self.norm(inputs + 7)

    net = Sometimes()
    expected = copy.deepcopy(net)
    train(net, [2, 6], batches(8, 3)[:1])
    batch = batches(8, 3)[0]
    expected.norm(batch)
    expected.norm(batch[2:] + 7)
    torch.testing.assert_close(net.norm.running_mean, expected.norm.running_mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net.norm.running_var, expected.norm.running_var, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_replica_that_leaves_a_layer_out_counts_nothing(momentum):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64)

        def forward(self, inputs):
            chosen = inputs[:, 0] > inputs[:, 0].mean() + 10 * (len(inputs) == 2)
            if chosen.sum() > 1:
                self.norm(inputs[chosen])

    net = Masked()
    expected = copy.deepcopy(net)
    train(net, [2, 6], batches(8, 3))
    for batch in batches(8, 3):
        expected(batch[2:])
    assert difference(net, expected) < 1e-12
    assert net.norm.num_batches_tracked == 3


def test_statistics_and_momentum_may_be_set_in_a_step():
    class Resetting(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
            self.norm.running_var.fill_(100)

        def forward(self, inputs):
            if self.norm.num_batches_tracked == 1:
                self.norm.reset_running_stats()
                self.norm.momentum = 0.4
            self.norm(inputs)

    net = Resetting()
    reference = copy.deepcopy(net)
    train(net, [2, 6], batches(8, 3)[:2])
    for batch in batches(8, 3)[:2]:
        reference(batch)
    assert difference(net, reference) < 1e-12


def test_layers_of_several_widths_and_types_are_merged_together():
    net = nn.ModuleList(
        [
            nn.BatchNorm1d(3, dtype=torch.float64),
            nn.BatchNorm1d(5, momentum=0.3, dtype=torch.float64),
            nn.BatchNorm1d(2),
        ]
    )

    class Side(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = net

        def forward(self, inputs):
            wide = torch.cat([inputs, inputs[:, :2] * 3], dim=1)
            for layer, part in zip(self.layers, (inputs, wide, inputs[:, :2].float()), strict=True):
                layer(part)

    side = Side()
    reference = copy.deepcopy(side)
    train(side, [2, 6], batches(8, 3))
    for batch in batches(8, 3):
        reference(batch)
    assert difference(net[:2], reference.layers[:2]) < 1e-12
    assert difference(net[2], reference.layers[2]) < 1e-5


def test_in_evaluation_nothing_changes():
    net = nn.BatchNorm1d(3, dtype=torch.float64).eval()
    before = copy.deepcopy(net)
    train(net, [2, 6], batches(8, 3))
    assert difference(net, before) == 0


def test_an_own_forward_of_a_layer_is_kept():
    net = nn.BatchNorm1d(3, dtype=torch.float64)
    net.forward = lambda inputs: nn.BatchNorm1d.forward(net, inputs) * 0 + 42
    replicas = Replicas(net, [CPU])
    replicas.refresh()
    BatchNormObserver(replicas)
    assert (replicas[0].module(batches(8, 3)[0]) == 42).all()


@pytest.mark.parametrize(
    ("module", "shape", "refused"),
    [
        (nn.BatchNorm1d(3), (4, 3), True),
        (nn.BatchNorm1d(3), (4, 3, 5), False),
        (nn.BatchNorm2d(3), (4, 3, 2, 2), False),
        (nn.BatchNorm2d(3), (4, 3, 1, 1), True),
    ],
)
def test_the_first_batch_shows_whether_one_sample_is_enough(module, shape, refused):
    replicas = Replicas(module, [CPU] * 2)
    replicas.refresh()
    observer = BatchNormObserver(replicas)
    assert observer.refuses_single_samples()  # careful until it knows
    replicas[0].module(torch.randn(shape))
    assert observer.refuses_single_samples() is refused
    module.eval()
    assert not observer.refuses_single_samples()
    without = Replicas(nn.Linear(2, 2), [CPU] * 2)
    without.refresh()
    assert not BatchNormObserver(without).refuses_single_samples()

"""Running statistics equal those of one device that sees the whole batch."""

import copy

import pytest
import torch
from torch import nn

from lightning_ddp_ext.replicas.buffer_merger import BatchNormObserver, BufferMerger
from tests.replicas.test_replicas import replicate

pytestmark = pytest.mark.usefixtures("tensors_on_device")


def train(net, sizes, batches, observed=True):
    """Run batches cut into chunks, and merge after each."""
    replicas = replicate(net, len(sizes))
    observer, merger = BatchNormObserver(replicas), BufferMerger(replicas)
    active = [index for index, size in enumerate(sizes) if size]
    for batch in batches:
        replicas.refresh()
        observer.expect(active)
        for index, chunk in zip(range(len(sizes)), batch.split(sizes), strict=True):
            if index in active:
                replicas[index].module(chunk)
        merged = observer.merge(active, [sizes[index] for index in active]) if observed else set()
        merger.merge(active, [sizes[index] for index in active], merged)


def batches(*shape):
    generator = torch.Generator().manual_seed(2)
    drift = torch.arange(shape[0], dtype=torch.float64).reshape(-1, *[1] * (len(shape) - 1))
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) * 2 + drift for _ in range(3)]


def norm(width=3, **options):
    return nn.BatchNorm1d(width, dtype=torch.float64, **options)


def difference(net, reference):
    pairs = zip(net.buffers(), reference.buffers(), strict=True)
    return max(float((one - other).abs().max() / other.abs().max().clamp_min(1e-9)) for one, other in pairs)


def difference_to_one_device(net, sizes=(2, 6), data=None):
    """Train a module on replicas and a copy of it on whole batches; return the largest difference of their buffers."""
    data = batches(8, 3) if data is None else data
    reference = copy.deepcopy(net)
    train(net, list(sizes), data)
    for batch in data:
        reference(batch)
    return difference(net, reference)


@pytest.mark.parametrize("momentum", [0.1, 1.0, None, 0.0])
@pytest.mark.parametrize(("layer", "shape"), [(nn.BatchNorm1d, (8, 3)), (nn.BatchNorm2d, (8, 3, 2, 2))])
def test_statistics_of_one_layer_are_those_of_the_whole_batch(layer, shape, momentum):
    for sizes in ([4, 4], [2, 6], [0, 8], [3, 0, 5], [2, 2, 4]):
        net = layer(3, momentum=momentum, dtype=torch.float64)
        assert difference_to_one_device(net, sizes, batches(*shape)) < 1e-12, sizes
    for sizes in ([8], [0, 8]):  # a single replica's statistics are copied
        assert difference_to_one_device(layer(3, momentum=momentum, dtype=torch.float64), sizes, batches(*shape)) == 0
        assert net.num_batches_tracked == 3


def test_the_test_fails_without_the_variance_between_chunks():
    net = norm()
    reference = copy.deepcopy(net)
    with pytest.warns(UserWarning, match="was changed differently") as warned:
        train(net, [2, 6], batches(8, 3), observed=False)
    assert len(warned) == 2  # mean and variance, once each
    for batch in batches(8, 3):
        reference(batch)
    torch.testing.assert_close(net.running_mean, reference.running_mean)
    assert difference(net, reference) > 0.05


class Normalised(nn.Module):
    """Runs a function of a batch normalisation layer and the inputs."""

    def __init__(self, run, **options):
        super().__init__()
        self.norm, self.run = norm(**options), run

    def forward(self, inputs):
        self.run(self.norm, inputs)


def several(norm, inputs):  # not one call behind another: the output of a layer depends on the chunk
    for values in (inputs, inputs.square(), inputs - 5):
        norm(values)


def again_for_six_samples(norm, inputs):
    norm(inputs)
    if len(inputs) > 2:
        norm(inputs[-6:] + 7)


def only_for_six_samples(norm, inputs):
    if len(inputs) > 2:
        norm(inputs[-6:])


def reset_in_the_step(norm, inputs):
    if norm.num_batches_tracked == 1:
        norm.reset_running_stats()
        norm.momentum = 0.4
    norm(inputs)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("run", [several, again_for_six_samples, only_for_six_samples, reset_in_the_step])
def test_calls_of_a_layer_have_the_weight_of_their_values(run, momentum):
    assert difference_to_one_device(Normalised(run, momentum=momentum), data=batches(8, 3)[:2]) < 1e-12


def test_layers_of_several_widths_and_types_are_merged_together():
    class Side(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([norm(), norm(5, momentum=0.3), nn.BatchNorm1d(2)])

        def forward(self, inputs):
            wide = torch.cat([inputs, inputs[:, :2] * 3], dim=1)
            for layer, part in zip(self.layers, (inputs, wide, inputs[:, :2].float()), strict=True):
                layer(part)

    net = Side()
    reference = copy.deepcopy(net)
    assert difference_to_one_device(net) < 1e-5
    for batch in batches(8, 3):
        reference(batch)
    assert difference(net.layers[:2], reference.layers[:2]) < 1e-12


def test_in_evaluation_nothing_changes():
    net = norm().eval()
    before = copy.deepcopy(net)
    train(net, [2, 6], batches(8, 3))
    assert difference(net, before) == 0


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
    replicas = replicate(module)
    observer = BatchNormObserver(replicas)
    assert observer.refuses_single_samples()  # careful until it knows
    replicas[0].module(torch.randn(shape))
    assert observer.refuses_single_samples() is refused
    module.eval()
    assert not observer.refuses_single_samples()
    assert not BatchNormObserver(replicate(nn.Linear(2, 2))).refuses_single_samples()

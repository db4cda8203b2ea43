"""Buffers change once per step, and the second forward pass sees the values of the first."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.activation_checkpointing.models import (
    STEPS,
    Normalised,
    difference,
    train,
    vectors,
    with_checkpointing,
)


class Codebook(nn.Module):
    """Computes with a buffer that it then moves, as vector quantisation does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.ones(4, dtype=torch.float64))
        self.alias = nn.Module()
        self.alias.register_buffer("same_codes", self.codes)
        self.seen = []

    def forward(self, inputs):
        self.seen.append(self.alias.same_codes.clone())
        outputs = inputs.square() * self.codes.clone()
        self.codes.mul_(0.5).add_(inputs.detach().mean(0))
        return outputs


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_updated_once_per_step(momentum):
    model = Normalised(nn.BatchNorm1d(4, momentum=momentum), nn.BatchNorm1d(4, momentum=momentum)).double()
    checkpointed, _ = with_checkpointing(model, nn.Sequential)
    assert difference(train(checkpointed, vectors), train(model, vectors)) < 1e-12
    for ours, theirs in zip(checkpointed.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert checkpointed.parts[0][1].num_batches_tracked == STEPS


def test_statistics_frozen_at_first_are_updated_once_when_they_thaw():
    model = Normalised(nn.BatchNorm1d(4)).double()
    checkpointed, _ = with_checkpointing(model, nn.Sequential)
    for net in (model, checkpointed):
        net.parts[0][1].eval()
        train(net, vectors)
        net.train()
        train(net, vectors)
    for ours, theirs in zip(checkpointed.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_layers_that_compute_with_buffers_they_change():
    model = Normalised(nn.Identity(), nn.Identity()).double()
    for part in model.parts:
        parametrizations.spectral_norm(part[0])
    checkpointed, _ = with_checkpointing(model, nn.Sequential)
    assert difference(train(checkpointed, vectors), train(model, vectors)) < 1e-12
    for ours, theirs in zip(checkpointed.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_shared_buffers_stay_shared_and_keep_their_identity():
    model = Normalised(Codebook()).double()
    checkpointed, _ = with_checkpointing(model, nn.Sequential)
    codebook = checkpointed.parts[0][1]
    before = codebook.codes
    assert difference(train(checkpointed, vectors), train(model, vectors)) < 1e-12
    assert codebook.codes is before
    assert codebook.alias.same_codes is before
    assert torch.equal(before, model.parts[0][1].codes)
    assert len(codebook.seen) == 2 * STEPS
    assert all(torch.equal(*codebook.seen[step : step + 2]) for step in range(0, 2 * STEPS, 2))


class Observed(nn.Module):
    """Begins to change buffers when it is told to, as observers for quantisation do."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.active = False
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, inputs):
        if self.active and self.how == "in place":
            self.scale.mul_(1.5)
        elif self.active and self.how == "replaced":
            self.scale = 1.5 * self.scale
        elif self.active and "scale" in self._buffers:
            del self.scale
            self.register_buffer("other", torch.full((4,), 2.0, dtype=torch.float64))
        return inputs.square() * (self.scale if "scale" in self._buffers else self.other).clone()


def gradients_and_buffers(model, switch):
    gradients = train(model, vectors)
    switch(model)
    return gradients + train(model, vectors), [
        (name, buffer) for part in model.modules() for name, buffer in part._buffers.items()
    ]


@pytest.mark.parametrize("how", ["in place", "replaced", "renamed"])
@pytest.mark.parametrize("calls", [1, 2])
def test_buffers_may_begin_to_change_at_any_time(how, calls):
    layers = [Observed(how)] * calls
    model = Normalised(*layers).double()
    checkpointed, _ = with_checkpointing(model, nn.Sequential)

    def activate(net):
        net.parts[0][1].active = True

    theirs, their_buffers = gradients_and_buffers(model, activate)
    ours, our_buffers = gradients_and_buffers(checkpointed, activate)
    assert difference(ours, theirs) < 1e-12
    for (our_name, our), (their_name, their) in zip(our_buffers, their_buffers, strict=True):
        assert our_name == their_name
        assert torch.equal(our, their)


class Silent(nn.Module):
    """Computes with running statistics that torch changes without counting, in training mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("var", torch.ones(4, dtype=torch.float64))

    def forward(self, inputs):
        inputs = inputs * (1 + self.mean.clone())
        return nn.functional.batch_norm(inputs, self.mean, self.var, training=self.training)


@pytest.mark.parametrize("kind", ["spectral norm", "silent"])
def test_buffers_of_modules_that_go_from_evaluation_to_training(kind):
    model = Normalised(Silent() if kind == "silent" else nn.Identity()).double()
    if kind == "spectral norm":
        parametrizations.spectral_norm(model.parts[0][0])
    checkpointed, _ = with_checkpointing(model.eval(), nn.Sequential)
    theirs, their_buffers = gradients_and_buffers(model, nn.Module.train)
    ours, our_buffers = gradients_and_buffers(checkpointed, nn.Module.train)
    assert difference(ours, theirs) < 1e-12
    for (our_name, our), (their_name, their) in zip(our_buffers, their_buffers, strict=True):
        assert our_name == their_name
        assert torch.equal(our, their)


def test_a_buffer_is_cloned_once_for_each_change(monkeypatch):
    model = Normalised(Observed("in place")).double()
    checkpointed, _ = with_checkpointing(model, nn.Sequential)
    clones = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: clones.append(tensor.shape) or clone(tensor))
    observed = checkpointed.parts[0][1]
    counts = []
    for active in (False, False, False, True, False, False):
        observed.active = active
        clones.clear()
        checkpointed(vectors()).sum()
        counts.append(len(clones) - 1)  # one is its own
    assert counts == [1, 0, 0, 0, 1, 0]

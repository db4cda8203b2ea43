"""Buffers change once per step, and the second forward pass sees the values of the first."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.activation_checkpointing.test_modules import (
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


def test_shared_buffers_stay_shared_and_keep_their_identity():
    model = Normalised(Codebook()).double()
    checkpointed, _ = with_checkpointing(model, nn.Sequential)
    codebook = checkpointed.parts[0][1]
    before = codebook.codes
    assert difference(train(checkpointed, vectors), train(model, vectors)) < 1e-12
    assert codebook.codes is before is codebook.alias.same_codes
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


class Silent(nn.Module):
    """Computes with running statistics that torch changes without counting, in training mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("var", torch.ones(4, dtype=torch.float64))

    def forward(self, inputs):
        inputs = inputs * (1 + self.mean.clone())
        return nn.functional.batch_norm(inputs, self.mean, self.var, training=self.training)


def spectral():
    model = Normalised(nn.Identity(), nn.Identity())
    for part in model.parts:
        parametrizations.spectral_norm(part[0])
    return model


def batch_norm(momentum=0.1):
    return Normalised(nn.BatchNorm1d(4, momentum=momentum), nn.BatchNorm1d(4, momentum=momentum))


def activate(model):
    model.parts[0][1].active = True


def freeze_statistics(model):
    model.parts[0][1].eval()


CASES = {
    "running statistics": (batch_norm, None, None),
    "cumulative statistics": (lambda: batch_norm(momentum=None), None, None),
    "statistics frozen at first": (batch_norm, freeze_statistics, nn.Module.train),
    "spectral norm": (spectral, None, None),
    "spectral norm, evaluated at first": (spectral, nn.Module.eval, nn.Module.train),
    "changes that torch does not count": (lambda: Normalised(Silent()), nn.Module.eval, nn.Module.train),
    **{
        f"{how} later, {n} calls": (lambda how=how, n=n: Normalised(*[Observed(how)] * n), None, activate)
        for how in ("in place", "replaced", "renamed")
        for n in (1, 2)
    },
}


@pytest.mark.parametrize("name", CASES)
def test_buffers_are_updated_once_per_step(name):
    build, first, then = CASES[name]
    model = build().double()
    checkpointed, _ = with_checkpointing(model, nn.Sequential)
    found = []
    for net in (checkpointed, model):
        gradients = []
        for prepare in (first, then):
            if prepare is not None:
                prepare(net)
            gradients += train(net, vectors)
        found.append((gradients, [item for part in net.modules() for item in part._buffers.items()]))
    (ours, our_buffers), (theirs, their_buffers) = found
    assert difference(ours, theirs) < 1e-12
    assert our_buffers
    for (our_name, our), (their_name, their) in zip(our_buffers, their_buffers, strict=True):
        assert our_name == their_name
        assert torch.equal(our, their)

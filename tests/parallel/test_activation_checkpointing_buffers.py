"""Buffers that a recomputed forward pass changes: they change once, and it is computed with what they were."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.parallel.recomputed_models import STEPS, Normalised, difference, train, vectors, with_segments


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
    recomputing, _ = with_segments(model, nn.Sequential)
    assert difference(train(recomputing, vectors), train(model, vectors)) < 1e-12
    for ours, theirs in zip(recomputing.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert recomputing.segments[0][1].num_batches_tracked == STEPS


def test_statistics_frozen_at_first_are_updated_once_when_they_thaw():
    model = Normalised(nn.BatchNorm1d(4)).double()
    recomputing, _ = with_segments(model, nn.Sequential)
    for net in (model, recomputing):
        net.segments[0][1].eval()
        train(net, vectors)
        net.train()
        train(net, vectors)
    for ours, theirs in zip(recomputing.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_test_of_statistics_fails_with_torchs_checkpoint_alone():
    class Twice(Normalised):
        def forward(self, inputs):
            return checkpoint(super().forward, inputs, use_reentrant=False)

    model = Twice(nn.BatchNorm1d(4)).double()
    train(model, vectors)
    assert model.segments[0][1].num_batches_tracked == 2 * STEPS


def test_layers_that_compute_with_buffers_they_change_are_recomputed_as_they_ran():
    model = Normalised(nn.Identity(), nn.Identity()).double()
    for segment in model.segments:
        parametrizations.spectral_norm(segment[0])
    recomputing, _ = with_segments(model, nn.Sequential)
    assert difference(train(recomputing, vectors), train(model, vectors)) < 1e-12
    for ours, theirs in zip(recomputing.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_shared_buffers_stay_shared_and_keep_their_identity():
    model = Normalised(Codebook()).double()
    recomputing, _ = with_segments(model, nn.Sequential)
    codebook = recomputing.segments[0][1]
    before = codebook.codes
    assert difference(train(recomputing, vectors), train(model, vectors)) < 1e-12
    assert codebook.codes is before
    assert codebook.alias.same_codes is before
    assert torch.equal(before, model.segments[0][1].codes)
    assert len(codebook.seen) == 2 * STEPS
    assert all(torch.equal(*codebook.seen[step : step + 2]) for step in range(0, 2 * STEPS, 2))

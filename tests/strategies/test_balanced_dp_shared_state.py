"""Replicas share a random generator and the cache of `torch.nn.utils.parametrize.cached()`; results stay the same."""

import contextlib
import threading
import time

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from lightning_ddp_ext import UnsupportedFeatureError
from lightning_ddp_ext.replicas.workers import current_replica
from tests.parity import FEATURES, Classifier, assert_same_training, balanced, batches, seeded, train

_DRAWS = "ignore:`training_step` draws random numbers"
_ORDERED = r"`training_step` uses `torch.nn.utils.parametrize.cached\(\)`, whose cache all replicas share. They run"


@pytest.mark.filterwarnings(_DRAWS)
def test_a_seed_reproduces_a_run_bit_for_bit():
    class Dropping(Classifier):
        def __init__(self):
            super().__init__()
            self.network = nn.Sequential(nn.Linear(FEATURES, 64), nn.Dropout(0.5), nn.Linear(64, 3))

    def run():
        seed_everything(7, verbose=False)
        return train(Dropping(), balanced([2, 6]), 2).parameters

    assert all(torch.equal(p, q) for p, q in zip(run(), run(), strict=True))


@pytest.mark.filterwarnings(_DRAWS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_draws_the_masks_of_the_forward_pass(use_reentrant):
    masks_of_steps = []

    class Recomputed(Classifier):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))

        def training_step(self, batch, batch_idx):
            masks = []

            def dropped(layer, hidden):
                output = layer(hidden)
                masks.append((torch.rand_like(output) > 0.5).to(output))
                return output * masks[-1]

            hidden = batch[0].requires_grad_()
            for layer in self.layers:
                hidden = checkpoint(dropped, layer, hidden, use_reentrant=use_reentrant)
            masks_of_steps.append(masks)
            return functional.cross_entropy(self.network(hidden), batch[1])

    train(Recomputed(), "balanced_dp", 2, loader=batches(64), max_epochs=2)
    assert len(masks_of_steps) == 32
    for masks in masks_of_steps:
        assert len(masks) == 8  # four in the forward pass, and again in reverse order
        assert all(torch.equal(one, two) for one, two in zip(masks[:4], reversed(masks[4:]), strict=True))


class DrawsLater(Classifier):
    """Draws random numbers from its third batch on; the second replica would be the first to draw."""

    def __init__(self):
        super().__init__()
        self.drawn, self.states, self.batches_seen = [], [], []

    def on_train_batch_start(self, batch, batch_idx):
        self.states.append(torch.get_rng_state())

    def training_step(self, batch, batch_idx):
        self.batches_seen.append(batch_idx)
        if batch_idx >= 2:
            time.sleep(0.0 if current_replica() else 0.1)
            self.drawn.append(torch.randint(10**6, (1,)).item())
        return super().training_step(batch, batch_idx)


def test_the_first_step_that_draws_is_repeated_in_order_and_leaves_no_other_trace():
    single = train(seeded(DrawsLater), max_epochs=1)
    with pytest.warns(UserWarning, match="`training_step` draws random numbers"):
        parallel = train(seeded(DrawsLater), balanced([2, 6]), 2, max_epochs=1)
    torch.set_rng_state(parallel.module.states[2])
    assert parallel.module.drawn == torch.randint(10**6, (4,)).tolist()
    assert parallel.module.batches_seen == [0, 0, 1, 1, 2, 2, 3, 3]
    assert_same_training(parallel, single)


@pytest.mark.filterwarnings("ignore:`training_step` draws random numbers")
def test_a_step_that_has_changed_its_batch_cannot_be_repeated():
    class Changes(DrawsLater):
        def training_step(self, batch, batch_idx):
            batch[0] = 2 * batch[0]
            return super().training_step(batch, batch_idx)

    with pytest.raises(UnsupportedFeatureError, match="`training_step` has changed its batch, and draws random"):
        train(seeded(Changes), balanced([2, 6]), 2, max_epochs=1)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Cached(Classifier):
    """Uses a parametrized weight twice, while another replica does so if they run at the same time."""

    def __init__(self, barrier=None, first_batch=0):
        super().__init__()
        self.barriers, self.first_batch = [barrier or threading.Barrier(2)], first_batch
        self.mixing = parametrize.register_parametrization(nn.Linear(FEATURES, FEATURES), "weight", Symmetric())

    def training_step(self, batch, batch_idx):
        with parametrize.cached() if batch_idx >= self.first_batch else contextlib.nullcontext():
            hidden = self.mixing(batch[0]).tanh()
            if threading.current_thread() is not threading.main_thread():  # replicas run side by side
                self.barriers[0].wait(timeout=10)
            loss = functional.cross_entropy(self.network(self.mixing(hidden)), batch[1])
        # A weight of another replica would have no gradient.
        (gradient,) = torch.autograd.grad(loss, [self.mixing.parametrizations.weight.original], retain_graph=True)
        return loss + 0.01 * gradient.pow(2).sum()


def fit(*arguments, strategy="auto", devices=1):
    return train(seeded(lambda: Cached(*arguments)), strategy, devices, max_epochs=2)


def test_a_step_that_uses_the_cache_trains_as_on_one_device():
    with pytest.warns(UserWarning, match=_ORDERED) as caught:
        parallel = fit(strategy=balanced([2, 6]), devices=2)
    assert sum("parametrize" in str(warning.message) for warning in caught) == 1
    assert_same_training(parallel, fit())


def test_parametrizations_without_the_cache_leave_replicas_side_by_side():
    met = []
    barrier = threading.Barrier(2, action=lambda: met.append(threading.current_thread()))
    fit(barrier, 100, strategy=balanced([2, 6]), devices=2)
    assert len(met) == 7  # all batches but the first, which is watched


def test_a_step_that_uses_the_cache_after_its_first_batch_is_refused():
    with pytest.raises(UnsupportedFeatureError, match="but did not in its first batch"):
        fit(None, 2, strategy=balanced([2, 6]), devices=2)

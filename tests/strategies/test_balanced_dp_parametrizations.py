"""`torch.nn.utils.parametrize.cached()` inside a step, although threads share its cache."""

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from lightning_ddp_ext import UnsupportedFeatureError
from tests.parity import FEATURES, Classifier, assert_same_training, balanced, seeded, train

_ORDERED = r"`training_step` uses `torch.nn.utils.parametrize.cached\(\)`, whose cache all replicas share. They run"


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
        cached = parametrize.cached() if batch_idx >= self.first_batch else contextlib.nullcontext()
        with cached:
            hidden = self.mixing(batch[0]).tanh()
            if threading.current_thread() is not threading.main_thread():  # where replicas run one after another
                self.barriers[0].wait(timeout=10)
            loss = functional.cross_entropy(self.network(self.mixing(hidden)), batch[1])
        # Of another replica's weight there is no gradient.
        (gradient,) = torch.autograd.grad(loss, [self.mixing.parametrizations.weight.original], retain_graph=True)
        return loss + 0.01 * gradient.pow(2).sum()


def fit(model, *arguments):
    return train(model, *arguments, max_epochs=2)


def test_a_step_that_uses_the_cache_trains_as_on_one_device():
    with pytest.warns(UserWarning, match=_ORDERED) as caught:
        parallel = fit(seeded(Cached), balanced([2, 6]), 2)
    assert sum("parametrize" in str(warning.message) for warning in caught) == 1
    assert_same_training(parallel, fit(seeded(Cached)))


def test_parametrizations_without_the_cache_leave_replicas_side_by_side():
    met = []
    barrier = threading.Barrier(2, action=lambda: met.append(threading.current_thread()))
    fit(seeded(lambda: Cached(barrier, first_batch=100)), balanced([2, 6]), 2)
    assert len(met) == 7  # all batches but the first, which is watched


def test_a_step_that_uses_the_cache_after_its_first_batch_is_refused():
    with pytest.raises(UnsupportedFeatureError, match="but did not in its first batch"):
        fit(seeded(lambda: Cached(first_batch=2)), balanced([2, 6]), 2)

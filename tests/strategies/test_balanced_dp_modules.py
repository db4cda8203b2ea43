"""Modules that change between steps, are compiled, or share random numbers and caches among replicas."""

import contextlib
import threading
import time

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from lightning_ddp_ext import UnsupportedFeatureError
from lightning_ddp_ext._compat.torch import recompile_limit, recompile_limit_of
from lightning_ddp_ext.replicas.workers import current_replica
from tests.support.devices import device
from tests.support.training import (
    CLASSES,
    FEATURES,
    Classifier,
    Evaluated,
    assert_same_training,
    balanced,
    batches,
    compare,
    dataset,
    normalised_network,
    relative_difference,
    seeded,
    train,
)


class Growing(Classifier):
    """Gets another head, and another optimizer group for it, in the second epoch."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            torch.manual_seed(5)
            self.network[2] = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)).to(self.device, torch.float64)
            self.optimizers().optimizer.add_param_group({"params": self.network[2].parameters(), "lr": 0.2})


def test_a_submodule_replaced_between_epochs():
    single, _ = compare(Growing)
    sizes = {gradient.numel() for gradient in single.gradients.after_backward}
    assert len(sizes) == 2


AVERAGES = {
    "swa": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2, annealing_epochs=1),
    "mean": WeightAveraging,
    "ema": lambda: EMAWeightAveraging(decay=0.8, update_starting_at_step=2),
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_of_weights(kind):
    def build():
        return Evaluated().double()  # before the callback copies it

    options = {"val_loader": batches(19), "max_epochs": 4}
    single, _ = compare(build, lambda: {**options, "callbacks": [AVERAGES[kind]()]})
    assert relative_difference(train(seeded(build), **options).parameters, single.parameters) > 1e-3


def test_swa_collects_the_statistics_of_batch_norm_for_the_averaged_weights():
    class KeepsHidden(Evaluated):
        """Keeps the input of batch normalisation for all samples, with the weights at the start of the last epoch."""

        def __init__(self):
            super().__init__()
            self.network = normalised_network()

        def on_train_epoch_start(self):
            self.hidden = self.network[0](dataset(32).tensors[0].to(self.device)).detach()

    options = {"loader": batches(32), "callbacks": [AVERAGES["swa"]()], "max_epochs": 4}
    trained = train(seeded(KeepsHidden), balanced([2, 6]), 2, **options)
    norm = trained.module.network[1]
    # The mean over batches of equal size is the mean over all samples.
    torch.testing.assert_close(norm.running_mean.cpu(), trained.module.hidden.mean(0).cpu(), rtol=1e-12, atol=1e-12)
    assert norm.num_batches_tracked == 4


class Net(nn.Sequential):
    """Dynamo skips classes of torch itself, so that compiling a plain `Sequential` does nothing."""

    def __init__(self, *norm):
        super().__init__(nn.Linear(FEATURES, 7), *norm, nn.Tanh(), nn.Linear(7, CLASSES))

    def forward(self, inputs):
        for layer in self:
            inputs = layer(inputs)
        return inputs


class Compiled(Evaluated):
    """Compiles its network in one of several ways, and notes the threads on which the compiled code runs."""

    def __init__(self, how, *norm):
        super().__init__()
        self.network = Net(*norm)
        self.threads = set()
        if how == "wrapper":
            self.network = torch.compile(self.network, backend=self.backend, fullgraph=True)
        elif how == "method":
            self.network.compile(backend=self.backend, fullgraph=True)

    def backend(self, graph, inputs):
        def run(*args):
            self.threads.add(threading.current_thread().name)
            return graph.forward(*args)

        return run


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    # Code is compiled for every chunk size, gradient mode and number of threads.
    with recompile_limit_of(64):
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler", "_side_by_side")
@pytest.mark.parametrize("how", ["wrapper", "method"])
def test_compiled_parts_run_compiled_on_every_replica(how):
    def run(kind, **way):
        # Equal batches, because every other size of a chunk is compiled again.
        return train(seeded(lambda: Compiled(kind)), **way, loader=batches(32), val_loader=batches(16), max_epochs=2)

    plain = run("not at all")
    parallel = run(how, strategy=balanced([2, 6]), devices=2)
    assert_same_training(parallel, plain)
    assert parallel.module.threads >= {f"replica-{index}-{device(index)}" for index in (0, 1)}


@pytest.mark.usefixtures("_side_by_side")
def test_the_recompile_limit_allows_for_the_threads_of_replicas_while_the_trainer_runs():
    limits, before = set(), recompile_limit()

    class Watching(Classifier):
        def training_step(self, batch, batch_idx):
            limits.add((threading.current_thread().name, recompile_limit()))
            return super().training_step(batch, batch_idx)

    train(Watching(), balanced([2, 6]), 2, max_epochs=1)
    threads = ["MainThread", *(f"replica-{index}-{device(index)}" for index in (0, 1))]
    assert limits == {(name, 2 * len({device(0), device(1)}) * before) for name in threads}
    assert recompile_limit() == before


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_batch_norm_has_the_statistics_of_eager_batch_norm():
    def run(kind):
        return train(seeded(lambda: Compiled(kind, nn.BatchNorm1d(7))), balanced([2, 6]), 2, max_epochs=2)

    plain, compiled = run("not at all"), run("method")
    assert_same_training(compiled, plain)
    for found, expected in zip(compiled.module.buffers(), plain.module.buffers(), strict=True):
        torch.testing.assert_close(found, expected)
    assert compiled.module.threads


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
        if self.first_batch:
            return loss
        # A weight of another replica would have no gradient.
        (gradient,) = torch.autograd.grad(loss, [self.mixing.parametrizations.weight.original], retain_graph=True)
        return loss + 0.01 * gradient.pow(2).sum()


def fit(*arguments, strategy="auto", devices=1):
    return train(seeded(lambda: Cached(*arguments)), strategy, devices, max_epochs=2)


@pytest.mark.usefixtures("_side_by_side")
def test_a_step_that_uses_the_cache_trains_as_on_one_device():
    with pytest.warns(UserWarning, match=_ORDERED) as caught:
        parallel = fit(strategy=balanced([2, 6]), devices=2)
    assert sum("parametrize" in str(warning.message) for warning in caught) == 1
    assert_same_training(parallel, fit())


@pytest.mark.usefixtures("_side_by_side")
def test_the_first_step_that_uses_the_cache_is_repeated_in_order():
    with pytest.warns(UserWarning, match=_ORDERED):
        parallel = fit(None, 2, strategy=balanced([2, 6]), devices=2)
    assert_same_training(parallel, fit(None, 2))


@pytest.mark.usefixtures("_side_by_side")
def test_parametrizations_without_the_cache_leave_replicas_side_by_side():
    met = []
    barrier = threading.Barrier(2, action=lambda: met.append(threading.current_thread()))
    fit(barrier, 100, strategy=balanced([2, 6]), devices=2)
    assert len(met) == 7  # all batches but the first, which is watched

"""The gradient that reaches the optimizer is the one a single device computes on the whole batch."""

from functools import cache

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.nn import functional

from lightning_ddp_ext import UnsupportedFeatureError
from tests.parity import (
    FEATURES,
    SPLITS,
    Classifier,
    assert_same_training,
    balanced,
    batches,
    relative_difference,
    seeded,
    train,
)


@cache
def one_device(samples, accumulate):
    return train(seeded(Classifier), loader=batches(samples), accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize(("split", "devices"), SPLITS)
@pytest.mark.parametrize("samples", [27, 25])  # last batches of 3 and of 1
def test_gradients_and_parameters_equal_one_device(split, devices, accumulate, samples):
    options = {"accumulate_grad_batches": accumulate, "loader": batches(samples)}
    parallel = train(seeded(Classifier), balanced(split), devices, **options)
    assert_same_training(parallel, one_device(samples, accumulate))


def test_the_test_fails_when_chunks_have_equal_weights():
    single = one_device(27, 1)
    parallel = train(seeded(Classifier), balanced([2, 6], weight_by="equal"), 2)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) > 1e-2
    assert relative_difference(parallel.parameters, single.parameters) > 1e-3


def test_all_samples_on_one_replica_give_every_bit_of_one_device():
    single, parallel = one_device(27, 1), train(seeded(Classifier), balanced([0, 1]), 2)
    assert all(torch.equal(p, q) for p, q in zip(parallel.parameters, single.parameters, strict=True))


@pytest.mark.parametrize("first", [0, 1, 2, 9])
def test_a_limited_first_device_gives_the_same_gradient(first):
    assert_same_training(train(seeded(Classifier), balanced(gpu0_batch_size=first), 3), one_device(27, 1))


class Summed(Classifier):
    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.network(batch[0]), batch[1], reduction="sum")


class Infinite(Classifier):
    """Adds a mask of infinities, as hand-written attention does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, 0.0, float("-inf")]))

    def training_step(self, batch, batch_idx):
        labels = batch[1].clamp(max=1)
        return functional.cross_entropy(self.network(batch[0]) + self.mask.to(batch[0]), labels)


@pytest.mark.parametrize(("build", "options"), [(Summed, {"weight_by": "sum"}), (Infinite, {})])
def test_losses_that_are_sums_and_infinities_in_buffers(build, options):
    parallel = train(seeded(build), balanced([2, 6], **options), 2)
    assert_same_training(parallel, train(seeded(build)))
    assert all(parameter.isfinite().all() for parameter in parallel.parameters)


class Masked(Classifier):
    """Ignores the labels of samples whose first feature is below a threshold."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold

    def count(self, batch):
        return float((batch[0][:, 0] > self.threshold).sum())

    def training_step(self, batch, batch_idx):
        features, labels = batch
        self.log("rows", float(len(labels)))
        if not self.count(batch) and type(self.trainer.strategy) is SingleDeviceStrategy:
            return None  # the loss would be nan
        return functional.cross_entropy(self.network(features), labels.where(features[:, 0] > self.threshold, -100))


def test_a_callable_weighs_by_the_terms_of_the_mean():
    def run(*strategy):
        return train(seeded(lambda: Masked(0.3)), *strategy, loader=batches(24))

    single = run()
    assert all(gradient.isfinite().all() for gradient in single.gradients.after_backward)
    parallel = run(balanced([3, 5], weight_by=Masked(0.3).count), 2)
    by_samples = run(balanced([3, 5]), 2)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12
    assert relative_difference(by_samples.gradients.after_backward, single.gradients.after_backward) > 1e-2


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_of_zero_total_weight_is_skipped_as_on_one_device():
    count = Masked(1.0).count
    assert {count(batch) > 0 for batch in batches(60, 4)} == {False, True}
    single = train(seeded(lambda: Masked(1.0)), loader=batches(60, 4))
    parallel = train(seeded(lambda: Masked(1.0)), balanced([1, 3], weight_by=count), 2, loader=batches(60, 4))
    assert relative_difference(parallel.parameters, single.parameters) < 1e-12
    assert all(parameter.isfinite().all() for parameter in parallel.parameters)


def test_training_step_may_return_a_dictionary():
    class Returning(Classifier):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "rows": batch[0][:, 0].detach()}

    class Outputs(Callback):
        rows = ()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            Outputs.rows = (outputs["rows"], batch[0][:, 0])
            assert outputs["loss"].ndim == 0

    single = train(seeded(Returning))
    parallel = train(seeded(Returning), balanced([2, 6]), 2, callbacks=[Outputs()])
    assert torch.equal(*Outputs.rows)
    assert relative_difference(parallel.parameters, single.parameters) < 1e-12


def test_a_module_with_single_sample_batch_norm_trains():
    class Normalised(Classifier):
        def __init__(self):
            super().__init__()
            self.network = nn.Sequential(nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))

    strategy = balanced([1, 7])
    sizes = []

    class Sizes(Callback):
        def on_train_batch_end(self, trainer, *args):
            sizes.append(trainer.strategy.chunk_sizes)

    train(seeded(Normalised), strategy, 2, callbacks=[Sizes()], max_epochs=1)
    assert sizes == [[0, 8], [0, 8], [0, 8], [0, 3]]


def test_a_step_that_changes_parameters_is_refused():
    class Decaying(Classifier):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.network[0].weight.mul_(0.9)
            return super().training_step(batch, batch_idx)

    with pytest.raises(UnsupportedFeatureError, match=r"`network\.0\.weight` was changed in place"):
        train(Decaying(), balanced(), 2)

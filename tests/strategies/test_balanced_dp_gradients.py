"""The gradient that reaches the optimizer is the one a single device computes on the whole batch."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ddp_ext import UnsupportedFeatureError
from tests.parity import FEATURES, SPLITS, Classifier, balanced, dataset, relative_difference, seeded, train


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize(("split", "devices"), SPLITS)
@pytest.mark.parametrize("samples", [27, 25])  # last batches of 3 and of 1
def test_gradients_and_parameters_equal_one_device(split, devices, accumulate, samples):
    def loader():
        return DataLoader(dataset(samples), batch_size=8)

    options = {"accumulate_grad_batches": accumulate}
    single = train(seeded(Classifier), loader=loader(), **options)
    parallel = train(seeded(Classifier), balanced(split), devices, loader=loader(), **options)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12
    assert relative_difference(parallel.gradients.before_step, single.gradients.before_step) < 1e-12
    assert relative_difference(parallel.parameters, single.parameters) < 1e-12
    assert parallel.trainer.callback_metrics.keys() == single.trainer.callback_metrics.keys()
    for name, value in single.trainer.callback_metrics.items():
        torch.testing.assert_close(parallel.trainer.callback_metrics[name], value, rtol=1e-9, atol=1e-9)


def test_the_test_fails_when_chunks_weigh_the_same():
    single = train(seeded(Classifier))
    parallel = train(seeded(Classifier), balanced([2, 6], weight_by="equal"), 2)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) > 1e-2
    assert relative_difference(parallel.parameters, single.parameters) > 1e-3


def test_in_float32_gradients_agree_to_rounding():
    def run(*strategy):
        loader = DataLoader(dataset(27, torch.float32), batch_size=8)
        return train(seeded(Classifier), *strategy, loader=loader, precision="32-true", max_epochs=1)

    single, parallel = run(), run(balanced([2, 6]), 2)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-5


def test_all_samples_on_one_replica_give_every_bit_of_one_device():
    single = train(seeded(Classifier))
    parallel = train(seeded(Classifier), balanced([0, 1]), 2)
    assert all(torch.equal(p, q) for p, q in zip(parallel.parameters, single.parameters, strict=True))


@pytest.mark.parametrize("first", [0, 1, 2, 9])
def test_a_limited_first_device_gives_the_same_gradient(first):
    single = train(seeded(Classifier))
    parallel = train(seeded(Classifier), balanced(gpu0_batch_size=first), 3)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


def test_losses_that_are_sums_are_added():
    class Summed(Classifier):
        def training_step(self, batch, batch_idx):
            return functional.cross_entropy(self.network(batch[0]), batch[1], reduction="sum")

    single = train(seeded(Summed))
    parallel = train(seeded(Summed), balanced([2, 6], weight_by="sum"), 2)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


def test_a_callable_weighs_by_what_the_loss_is_a_mean_over():
    class Masked(Classifier):
        def training_step(self, batch, batch_idx):
            features, labels = batch
            labels = torch.where(features[:, 0] > 0.3, labels, -100)
            return functional.cross_entropy(self.network(features), labels)

    def counted(batch):
        return float((batch[0][:, 0] > 0.3).sum())

    def run(*strategy):
        return train(seeded(Masked), *strategy, loader=DataLoader(dataset(24), batch_size=8))

    single = run()
    assert all(gradient.isfinite().all() for gradient in single.gradients.after_backward)
    parallel = run(balanced([3, 5], weight_by=counted), 2)
    by_samples = run(balanced([3, 5]), 2)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12
    assert relative_difference(by_samples.gradients.after_backward, single.gradients.after_backward) > 1e-2


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_of_which_nothing_counts_leaves_no_gradient():
    """One device leaves it out; its loss would be nan."""

    class Masked(Classifier):
        def training_step(self, batch, batch_idx):
            features, labels = batch
            self.log("rows", float(len(labels)))
            labels = torch.where(features[:, 0] > 1.0, labels, -100)
            if (labels == -100).all() and type(self.trainer.strategy) is SingleDeviceStrategy:
                return None
            return functional.cross_entropy(self.network(features), labels)

    def counted(batch):
        return float((batch[0][:, 0] > 1.0).sum())

    def loader():
        return DataLoader(dataset(60), batch_size=4)

    counts = {counted(batch) > 0 for batch in loader()}
    assert counts == {False, True}
    single = train(seeded(Masked), loader=loader())
    parallel = train(seeded(Masked), balanced([1, 3], weight_by=counted), 2, loader=loader())
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


class Masked(Classifier):
    """Adds a mask of infinities, as hand-written attention does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, 0.0, float("-inf")]))

    def training_step(self, batch, batch_idx):
        labels = batch[1].clamp(max=1)
        return functional.cross_entropy(self.network(batch[0]) + self.mask.to(batch[0]), labels)


def test_infinities_in_buffers_survive():
    single, parallel = train(seeded(Masked)), train(seeded(Masked), balanced([2, 6]), 2)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


def test_a_step_that_changes_parameters_is_refused():
    class Decaying(Classifier):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.network[0].weight.mul_(0.9)
            return super().training_step(batch, batch_idx)

    with pytest.raises(UnsupportedFeatureError, match=r"`network\.0\.weight` was changed in place"):
        train(Decaying(), balanced(), 2)

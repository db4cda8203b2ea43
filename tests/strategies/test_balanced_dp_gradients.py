"""Gradients, evaluation and predictions equal those of a single device on the whole batch."""

from functools import cache

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.nn import functional

from lightning_ddp_ext import UnsupportedFeatureError
from tests.parity import (
    SPLITS,
    Classifier,
    Evaluated,
    assert_same_training,
    balanced,
    batches,
    compare,
    normalised_network,
    quiet_trainer,
    relative_difference,
    seeded,
    train,
)


@cache
def one_device(samples, accumulate):
    return train(seeded(Classifier), loader=batches(samples), accumulate_grad_batches=accumulate)


@pytest.mark.parametrize(("samples", "accumulate"), [(27, 1), (27, 2), (25, 3)])  # last batches of 3 and of 1
@pytest.mark.parametrize(("split", "devices"), SPLITS)
def test_gradients_and_parameters_equal_one_device(split, devices, accumulate, samples):
    options = {"accumulate_grad_batches": accumulate, "loader": batches(samples)}
    parallel = train(seeded(Classifier), balanced(split), devices, **options)
    assert_same_training(parallel, one_device(samples, accumulate))


@pytest.mark.parametrize(("split", "devices"), SPLITS)
@pytest.mark.parametrize("samples", [1, 2, 27])
def test_validation_test_and_predictions_equal_one_device(split, devices, samples):
    def run(strategy, count):
        trainer = quiet_trainer(strategy, count, precision="64-true")
        module, loaders = seeded(Evaluated), [batches(samples), batches(samples)]
        results = trainer.validate(module, loaders[0], verbose=False) + trainer.test(module, loaders, verbose=False)
        return results, trainer.predict(module, loaders[0])

    found, predicted = run(balanced(split), devices)
    expected, predictions = run("auto", 1)
    assert found == [pytest.approx(result, abs=1e-9) for result in expected]
    torch.testing.assert_close(predicted, predictions)
    assert len(predictions) == -(-samples // 8)


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
    _, parallel = compare(build, split=[2, 6], **options)
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
    options = {"loader": batches(60, 4), "max_epochs": 1}
    single = train(seeded(lambda: Masked(1.0)), **options)
    parallel = train(seeded(lambda: Masked(1.0)), balanced([1, 3], weight_by=count), 2, **options)
    assert relative_difference(parallel.parameters, single.parameters) < 1e-12
    assert all(parameter.isfinite().all() for parameter in parallel.parameters)


def test_outputs_of_training_step_are_gathered():
    class Returning(Classifier):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "rows": batch[0][:, 0].detach()}

    class Outputs(Callback):
        rows = ()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            Outputs.rows = (outputs["rows"], batch[0][:, 0])
            assert outputs["loss"].ndim == 0

    compare(Returning, {"callbacks": [Outputs()]})
    gathered, given = Outputs.rows
    assert torch.equal(gathered.cpu(), given.cpu())  # the batch of a callback stays where the loader put it


def test_a_module_with_single_sample_batch_norm_trains():
    class Normalised(Classifier):
        def __init__(self):
            super().__init__()
            self.network = normalised_network()

    sizes = []

    class Sizes(Callback):
        def on_train_batch_end(self, trainer, *args):
            sizes.append(trainer.strategy.chunk_sizes)

    train(seeded(Normalised), balanced([1, 7]), 2, callbacks=[Sizes()], max_epochs=1)
    assert sizes == [[0, 8], [0, 8], [0, 8], [0, 3]]


def test_a_step_that_changes_parameters_is_refused():
    class Decaying(Classifier):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.network[0].weight.mul_(0.9)
            return super().training_step(batch, batch_idx)

    with pytest.raises(UnsupportedFeatureError, match=r"`network\.0\.weight` was changed in place"):
        train(Decaying(), balanced(), 2)

"""Gradients, evaluation and predictions of `balanced_dp` equal one device on the whole batch, in any precision."""

from functools import cache

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.support.devices import accelerator, virtual_devices_lack
from tests.support.training import (
    SPLITS,
    Classifier,
    Evaluated,
    assert_same_training,
    balanced,
    batches,
    both_ways,
    compare,
    dataset,
    quiet_trainer,
    relative_difference,
    seeded,
    train,
)


@cache
def one_device(samples, accumulate):
    return train(seeded(Classifier), loader=batches(samples), accumulate_grad_batches=accumulate)


@pytest.mark.parametrize(("samples", "accumulate"), [(27, 1), (25, 3)])  # last batches of 3 and of 1
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
        results = trainer.validate(module, loaders[0], verbose=False) + trainer.test(
            module, dict(zip("ab", loaders, strict=True)), verbose=False
        )
        return results, trainer.predict(module, loaders)

    found, predicted = run(balanced(split), devices)
    expected, predictions = run("auto", 1)
    assert found == [pytest.approx(result, abs=1e-9) for result in expected]
    torch.testing.assert_close(predicted, predictions)
    assert [len(part) for part in predictions] == [-(-samples // 8)] * 2


def test_all_samples_on_one_replica_give_every_bit_of_one_device():
    single, parallel = one_device(27, 1), train(seeded(Classifier), balanced([0, 1]), 2)
    assert all(torch.equal(p, q) for p, q in zip(parallel.parameters, single.parameters, strict=True))


@pytest.mark.parametrize("first", [0, 1, 2, 9])
def test_a_limited_first_device_gives_the_same_gradient(first):
    assert_same_training(train(seeded(Classifier), balanced(gpu0_batch_size=first), 3), one_device(27, 1))


class Masked(Classifier):
    """Ignores the labels of samples whose first feature is below a threshold."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold

    def count(self, batch):
        return float((batch[0][:, 0] > self.threshold).sum())

    def training_step(self, batch, batch_idx):
        features, labels = batch
        if not self.count(batch) and type(self.trainer.strategy) is SingleDeviceStrategy:
            return None  # the loss would be nan
        return functional.cross_entropy(self.network(features), labels.where(features[:, 0] > self.threshold, -100))


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


class Typed(Evaluated):
    """Notes the types of features, weights and logits in its steps."""

    def __init__(self):
        super().__init__(torch.optim.SGD)
        self.types = []

    def training_step(self, batch, batch_idx):
        self.types.append((batch[0].dtype, self.network[0].weight.dtype, self.network(batch[0]).dtype))
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self.network(batch[0])


def run(precision, strategy="auto", devices=1, **options):
    loader = DataLoader(dataset(27, torch.float32), batch_size=8)
    return train(seeded(Typed), strategy, devices, loader=loader, precision=precision, **options)


SINGLE, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16


AUTOCAST = virtual_devices_lack("autocast in Lightning")


@pytest.mark.parametrize(
    ("precision", "types"),
    [
        ("32-true", (SINGLE, SINGLE, SINGLE)),
        pytest.param("bf16-mixed", (SINGLE, SINGLE, BRAIN), marks=AUTOCAST),
        ("bf16-true", (BRAIN, BRAIN, BRAIN)),
        ("16-true", (HALF, HALF, HALF)),
    ],
)
def test_gradients_and_predictions_agree_to_rounding(precision, types):
    single, parallel = both_ways(lambda **way: run(precision, **way))
    assert {*parallel.module.types} == {*single.module.types} == {types}
    assert [p.dtype for p in parallel.parameters] == [types[1]] * 4
    # A gradient is rounded when a replica has computed it and when they are added up: half an epsilon each time. Over
    # the steps of a run parameters differ by the same order.
    epsilon = torch.finfo(types[2]).eps
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 2 * epsilon
    assert relative_difference(parallel.parameters, single.parameters) < 2 * epsilon
    features = DataLoader(dataset(27, torch.float32), batch_size=8)
    predictions = [trained.trainer.predict(trained.module, features) for trained in (parallel, single)]
    assert {p.dtype for p in predictions[0]} == {types[2]}
    assert relative_difference(*predictions) < 4 * epsilon


@AUTOCAST
def test_low_precision_is_seen_in_the_gradient():
    exact, rounded = run("32-true", max_epochs=1), run("bf16-mixed", max_epochs=1)
    assert relative_difference(rounded.gradients.after_backward, exact.gradients.after_backward) > 1e-3


class Overflow(Typed):
    """Has a gradient that is infinite for one sample of the second batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx == 1 and len(batch[0]) in (6, 8) else loss


@pytest.mark.parametrize(("build", "skipped"), [(Typed, 0), (Overflow, 3)])
def test_a_gradient_scaler_scales_and_skips_whole_batches(build, skipped):
    def scaled(**way):
        scaler = torch.amp.GradScaler(accelerator(), init_scale=2.0**10, growth_interval=1000)
        loader = DataLoader(dataset(24, torch.float32), batch_size=8)
        plugins = [MixedPrecision("16-mixed", accelerator(), scaler)]
        options = {"loader": loader, "precision": None, "plugins": plugins, "gradient_clip_val": 0.2}
        return train(seeded(build), **way, **options), scaler.get_scale()

    (single, expected), (parallel, found) = both_ways(scaled)
    assert found == expected == 2.0 ** (10 - skipped)
    gradients = [[g for g in trained.gradients.after_backward if g.isfinite().all()] for trained in (parallel, single)]
    assert [len(found) for found in gradients] == [9 - skipped] * 2
    assert relative_difference(*gradients) < 2 * torch.finfo(HALF).eps
    assert gradients[1][0].norm() > 100  # scaled
    assert relative_difference(parallel.parameters, single.parameters) < 2 * torch.finfo(HALF).eps

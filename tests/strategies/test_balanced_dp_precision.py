"""Lightning's precision settings apply to every replica, with the rounding errors of one device."""

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from tests.parity import Evaluated, both_ways, dataset, relative_difference, seeded, train
from tests.support.devices import accelerator


class Typed(Evaluated):
    """Notes the types of features, weights and logits in its steps."""

    def __init__(self):
        super().__init__(torch.optim.SGD)
        self.types = set()

    def training_step(self, batch, batch_idx):
        self.types.add((batch[0].dtype, self.network[0].weight.dtype, self.network(batch[0]).dtype))
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self.network(batch[0])


def run(precision, strategy="auto", devices=1, **options):
    loader = DataLoader(dataset(27, torch.float32), batch_size=8)
    return train(seeded(Typed), strategy, devices, loader=loader, precision=precision, **options)


SINGLE, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("precision", "types"),
    [
        ("32-true", (SINGLE, SINGLE, SINGLE)),
        ("bf16-mixed", (SINGLE, SINGLE, BRAIN)),
        ("bf16-true", (BRAIN, BRAIN, BRAIN)),
        ("16-true", (HALF, HALF, HALF)),
    ],
)
def test_gradients_and_predictions_agree_to_rounding(precision, types):
    single, parallel = both_ways(lambda **way: run(precision, **way))
    assert parallel.module.types == single.module.types == {types}
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

"""Values logged in a step equal those of one device."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy
from tests.parity import Classifier, dataset, quiet_trainer, seeded


class Logging(Classifier):
    """Logs in every way; `scores` differ between samples."""

    def training_step(self, batch, batch_idx):
        features, labels = batch
        loss = functional.cross_entropy(self.network(features), labels)
        scores = features[:, 0]
        self.log("both", scores.mean(), on_step=True, on_epoch=True)
        self.log("number", float(scores.mean()), on_step=False, on_epoch=True)
        self.log("largest", scores.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("smallest", scores.min(), on_step=True, on_epoch=True, reduce_fx=torch.min)
        self.log("total", scores.sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log_dict({"one": scores.mean() + 1, "two": scores.mean() + 2}, on_step=True, on_epoch=True)
        self.log("own_size", scores.mean(), on_step=True, on_epoch=True, batch_size=len(scores))
        self.log("whole_size", scores.mean(), on_step=True, on_epoch=True, batch_size=8)
        self.log("size_one", scores.mean(), on_step=True, on_epoch=True, batch_size=1)
        self.log("positional", scores.mean(), True, False, True, True)
        self.log("count", (scores > 0).sum(), on_step=True, on_epoch=True)
        self.log("last_label", labels.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("first_label", labels.min(), on_step=True, on_epoch=True, reduce_fx=min)
        self.log("rows", len(scores), on_step=True, on_epoch=True)
        self.log("constant", 3, on_step=True, on_epoch=True)
        positive = scores[scores > 0.5]
        if len(positive):
            self.log("positive", positive.mean(), on_step=False, on_epoch=True, batch_size=len(positive))
        return loss


class StepValues(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, *args):
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def run(strategy, devices, module=Logging, **options):
    values = StepValues()
    trainer = quiet_trainer(strategy, devices, precision="64-true", max_epochs=2, callbacks=[values], **options)
    trained = seeded(module)
    trainer.fit(trained, DataLoader(dataset(27), batch_size=8))
    return values.values, {name: float(value) for name, value in trainer.callback_metrics.items()}, trained


@pytest.mark.filterwarnings(r"ignore:You called `self.log\('(count|last_label|first_label)', ...\)`")
@pytest.mark.parametrize(("split", "devices"), [([2, 6], 2), ([0, 8], 2), ([2, 3, 3], 3), (None, 2)])
def test_every_step_and_every_epoch_logs_what_one_device_logs(split, devices):
    steps, epoch, _ = run(BalancedDataParallelStrategy(split=split), devices)
    expected_steps, expected_epoch, _ = run("auto", 1)
    assert epoch == pytest.approx(expected_epoch, abs=1e-9)
    assert len(epoch) > 25
    for values, expected in zip(steps, expected_steps, strict=True):
        assert values == pytest.approx(expected, abs=1e-9)


def test_the_test_fails_when_chunks_weigh_the_same():
    _, epoch, _ = run(BalancedDataParallelStrategy(split=[2, 6], weight_by="ranks"), 2)
    _, expected, _ = run("auto", 1)
    assert abs(epoch["both_epoch"] - expected["both_epoch"]) > 1e-3


def test_a_weight_by_callable_weighs_logged_means_too():
    class Masked(Classifier):
        def training_step(self, batch, batch_idx):
            kept = batch[0][:, 0] > 0.3
            loss = functional.cross_entropy(self.network(batch[0][kept]), batch[1][kept])
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    def kept(batch):
        return float((batch[0][:, 0] > 0.3).sum())

    steps, _, _ = run(BalancedDataParallelStrategy(split=[4, 4], weight_by=kept), 2, Masked)
    expected, _, _ = run("auto", 1, Masked)
    assert [s["loss_step"] for s in steps] == pytest.approx([s["loss_step"] for s in expected], abs=1e-9)


def test_batch_sizes_that_count_something_in_each_chunk_may_agree_by_chance():
    agreed = []

    def count(batch):
        return int((1 + (batch[0][:, 1] > 0)).sum())

    class Boxes(Classifier):
        def training_step(self, batch, batch_idx):
            boxes = 1 + (batch[0][:, 1] > 0).double()
            losses = functional.cross_entropy(self.network(batch[0]), batch[1], reduction="none")
            loss = (losses * boxes).sum() / boxes.sum()
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=count(batch))
            agreed.append(count(batch))
            return loss

    strategy = BalancedDataParallelStrategy(split=[4, 4], weight_by=count)
    steps, epoch, _ = run(strategy, 2, Boxes)
    assert any(one == other for one, other in zip(agreed[::2], agreed[1::2], strict=True))
    expected_steps, expected_epoch, _ = run("auto", 1, Boxes)
    assert epoch == pytest.approx(expected_epoch, abs=1e-9)
    assert steps == [pytest.approx(step, abs=1e-9) for step in expected_steps]


def test_an_override_of_log_runs_once_with_the_value_of_the_batch():
    calls = []

    class Overriding(Logging):
        def log(self, name, value, **kwargs):
            calls.append(name)
            super().log(f"train/{name}", value, **kwargs)

        def training_step(self, batch, batch_idx):
            self.log("score", batch[0][:, 0].mean(), on_step=False, on_epoch=True)
            return functional.cross_entropy(self.network(batch[0]), batch[1])

    _, epoch, _ = run(BalancedDataParallelStrategy(split=[2, 6]), 2, Overriding)
    assert calls == ["score"] * 8
    calls.clear()
    _, expected, _ = run("auto", 1, Overriding)
    assert epoch == pytest.approx(expected)
    assert list(epoch) == ["train/score"]


def test_attributes_of_the_module_travel_to_the_replicas_and_back():
    class Stateful(Classifier):
        def __init__(self):
            super().__init__()
            self.steps, self.temperature, self.features = 0, 1.0, []

        def on_train_batch_start(self, batch, batch_idx):
            self.temperature = 1.0 + batch_idx

        def training_step(self, batch, batch_idx):
            self.steps += 1
            self.features.append(batch[0][:, 0].clone())
            return functional.cross_entropy(self.network(batch[0]) / self.temperature, batch[1])

    def features(module):
        return torch.cat(module.features)

    _, _, trained = run(BalancedDataParallelStrategy(split=[2, 3, 3]), 3, Stateful)
    _, _, expected = run("auto", 1, Stateful)
    assert trained.steps == expected.steps == 8
    assert torch.equal(features(trained), features(expected))
    for p, q in zip(trained.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)

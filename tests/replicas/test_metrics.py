"""Metrics that replicas update end in the module's own metric, equal to one device's."""

import threading

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

from lightning_ddp_ext import BalancedDataParallelStrategy
from tests.parity import CLASSES, Classifier, dataset, quiet_trainer, seeded


class OwnMetric(torchmetrics.Metric):
    """Needs its whole state during an update, so its states cannot be merged."""

    full_state_update = True

    def __init__(self):
        super().__init__()
        self.add_state("smoothed", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values):
        self.smoothed = 0.5 * self.smoothed + values.mean()

    def compute(self):
        return self.smoothed


class Measured(Classifier):
    def __init__(self):
        super().__init__()
        self.scalar = torchmetrics.MeanMetric()
        self.weighted = torchmetrics.MeanMetric()
        self.total = torchmetrics.SumMetric()
        self.largest = torchmetrics.MaxMetric()
        self.smallest = torchmetrics.MinMetric()
        self.kept = torchmetrics.CatMetric()
        self.pearson = torchmetrics.PearsonCorrCoef()
        self.own = OwnMetric()
        self.wrapped = torchmetrics.MinMaxMetric(torchmetrics.MeanSquaredError())
        self.named = nn.ModuleDict({"auroc": MulticlassAUROC(CLASSES)})
        self.grouped = torchmetrics.MetricCollection(
            [MulticlassPrecision(CLASSES), MulticlassRecall(CLASSES), MulticlassAccuracy(CLASSES, average="micro")],
            prefix="grouped/",
        )

    def on_train_start(self):
        # Moving a module to its device makes its metrics compute in the default dtype.
        for module in self.modules():
            if isinstance(module, torchmetrics.Metric):
                module.set_dtype(torch.float64)

    def training_step(self, batch, batch_idx):
        features, labels = batch
        logits = self.network(features)
        scores = features[:, 0]
        loss = functional.cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.scalar.update(loss.detach())
        self.weighted.update(loss.detach(), weight=len(scores))
        self.total.update(scores)
        self.largest.update(scores)
        self.smallest(scores)
        self.kept.update(scores)
        self.pearson.update(scores, features[:, 1])
        self.own.update(scores)
        self.wrapped.update(scores, features[:, 1])
        self.named["auroc"].update(logits.softmax(-1).detach(), labels)
        self.grouped.update(logits, labels)
        self.log_dict(self.grouped, on_step=False, on_epoch=True)
        self.log("largest", self.largest, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        names = ("scalar", "weighted", "total", "smallest", "kept", "pearson", "own")
        self.results = {name: getattr(self, name).compute().clone() for name in names}
        self.results |= {f"wrapped/{name}": value for name, value in self.wrapped.compute().items()}
        self.results["auroc"] = self.named["auroc"].compute()
        self.counts = {name: m.update_count for name, m in self.named_modules() if isinstance(m, torchmetrics.Metric)}
        for name in ("scalar", "weighted", "total", "smallest", "kept", "pearson", "own", "wrapped"):
            getattr(self, name).reset()
        self.named["auroc"].reset()


def run(strategy, devices):
    trainer = quiet_trainer(strategy, devices, precision="64-true", max_epochs=2)
    module = seeded(Measured)
    trainer.fit(module, DataLoader(dataset(27), batch_size=8))
    return module, dict(trainer.callback_metrics)


@pytest.mark.parametrize(("split", "devices"), [([2, 6], 2), ([0, 8], 2), ([7, 1], 2), ([2, 3, 3], 3)])
def test_metrics_equal_one_device(split, devices):
    module, logged = run(BalancedDataParallelStrategy(split=split), devices)
    expected, expected_logged = run("auto", 1)
    assert module.results.keys() == expected.results.keys()
    for name, value in expected.results.items():
        torch.testing.assert_close(module.results[name], value, rtol=1e-9, atol=1e-9, msg=name)
    assert module.counts == expected.counts
    assert logged.keys() == expected_logged.keys()
    for name, value in expected_logged.items():
        torch.testing.assert_close(logged[name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_compute_groups_are_formed_as_on_one_device():
    module, _ = run(BalancedDataParallelStrategy(split=[7, 1]), 2)
    expected, _ = run("auto", 1)
    assert module.grouped.compute_groups == expected.grouped.compute_groups
    assert len(expected.grouped.compute_groups) < 3


def test_a_mean_that_is_not_weighted_would_be_seen():
    module, _ = run(BalancedDataParallelStrategy(split=[2, 6], weight_by="equal"), 2)
    expected, _ = run("auto", 1)
    assert abs(module.results["scalar"] - expected.results["scalar"]) > 1e-4


def test_hooks_of_metrics_do_not_drag_along_what_they_are_bound_to():
    calls = []

    class Watched(Classifier):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()  # cannot be copied
            self.accuracy.register_forward_hook(self.count)

        def count(self, *args):
            with self.lock:
                calls.append("called")

    module = seeded(Watched)
    loader = DataLoader(dataset(16), batch_size=8)
    quiet_trainer("balanced_dp", 2, precision="64-true", max_epochs=1).fit(module, loader)
    assert len(calls) == 4


class StepValues(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, *args):
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class LogsWhatForwardReturns(Classifier):
    """`value = self.metric(...)`, `self.log("metric", value)`: on a replica the value is a chunk's."""

    def __init__(self):
        super().__init__()
        self.f1 = MulticlassF1Score(CLASSES)
        self.auroc = MulticlassAUROC(CLASSES)
        self.largest = torchmetrics.MaxMetric()
        self.kendall = torchmetrics.KendallRankCorrCoef()
        self.by_class = MulticlassRecall(CLASSES, average=None)
        self.range = torchmetrics.MinMaxMetric(MulticlassAccuracy(CLASSES, average="micro"))
        self.group = torchmetrics.MetricCollection([MulticlassPrecision(CLASSES), MulticlassAccuracy(CLASSES)])
        self.twice = torchmetrics.MeanSquaredError()

    def training_step(self, batch, batch_idx):
        features, labels = batch
        logits = self.network(features)
        both = {"on_step": True, "on_epoch": True}
        for name in ("f1", "auroc"):
            self.log(name, getattr(self, name)(logits.detach().softmax(-1), labels), **both)
        self.log("largest", self.largest(features[:, 0]), **both)
        self.log("kendall", self.kendall(features[:, 0], features[:, 1]), **both)
        self.log_dict({f"recall_{i}": value for i, value in enumerate(self.by_class(logits, labels))}, **both)
        self.log_dict(self.range(logits, labels), **both)
        self.log_dict(self.group(logits, labels), **both)
        self.log("first", self.twice(features[:, 0], features[:, 1]), **both)
        self.log("second", self.twice(features[:, 2], features[:, 3]), **both)
        self.log("twice", self.twice, **both)
        return functional.cross_entropy(logits, labels)


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets", "ignore:Average precision score")
@pytest.mark.parametrize(("split", "devices"), [([2, 6], 2), ([0, 8], 2), ([2, 3, 3], 3)])
def test_what_forward_returns_is_logged_as_the_value_of_the_batch(split, devices):
    runs = []
    for strategy, number in (("auto", 1), (BalancedDataParallelStrategy(split=split), devices)):
        steps = StepValues()
        trainer = quiet_trainer(strategy, number, precision="64-true", max_epochs=2, callbacks=[steps])
        trainer.fit(seeded(LogsWhatForwardReturns), DataLoader(dataset(28), batch_size=8))
        runs.append(steps.values)
    expected, values = runs
    assert len(expected[-1]) > 25
    for step, expected_step in zip(values, expected, strict=True):
        assert step == pytest.approx(expected_step, abs=1e-9)


def test_metrics_outside_of_the_module_tree_are_warned_about():
    class Hidden(Classifier):
        def __init__(self):
            super().__init__()
            self.losses = [torchmetrics.MeanMetric()]

    trainer = quiet_trainer(BalancedDataParallelStrategy(), 2, max_steps=1)
    with pytest.warns(UserWarning, match=r"`self.losses` holds a metric that is no submodule"):
        trainer.fit(seeded(Hidden), DataLoader(dataset(8, torch.float32), batch_size=8))


class Multioutput(Classifier):
    """Metrics whose states get one value per output, and metrics in a list inside another."""

    def __init__(self):
        super().__init__()
        self.r2 = torchmetrics.R2Score(multioutput="raw_values")
        self.explained = torchmetrics.ExplainedVariance(multioutput="raw_values")
        self.separate = torchmetrics.MultioutputWrapper(torchmetrics.R2Score(), CLASSES)
        self.correlated = torchmetrics.MultioutputWrapper(torchmetrics.PearsonCorrCoef(), CLASSES)

    def training_step(self, batch, batch_idx):
        features, labels = batch
        logits = self.network(features)
        for name in ("r2", "explained", "separate", "correlated"):
            value = getattr(self, name)(logits.detach(), features[:, :CLASSES])
            self.log_dict({f"{name}{output}": item for output, item in enumerate(value)}, on_step=True, on_epoch=False)
        return functional.cross_entropy(logits, labels)

    def on_train_epoch_end(self):
        metrics = {name: getattr(self, name) for name in ("r2", "explained", "separate", "correlated")}
        self.results = {name: metric.compute().clone() for name, metric in metrics.items()}
        for metric in metrics.values():
            metric.reset()


@pytest.mark.parametrize(("split", "devices"), [([2, 6], 2), ([2, 3, 3], 3)])
def test_metrics_of_several_outputs_equal_one_device(split, devices):
    def run(strategy, devices):
        trainer = quiet_trainer(strategy, devices, precision="64-true", max_epochs=2)
        module = seeded(Multioutput)
        trainer.fit(module, DataLoader(dataset(32), batch_size=8))
        return {**module.results, **trainer.callback_metrics}

    found, expected = run(BalancedDataParallelStrategy(split=split), devices), run("auto", 1)
    assert len(expected) == 4 + 4 * CLASSES
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)

"""Metrics that replicas update end in the module's own metric, equal to one device's."""

import threading
from typing import ClassVar

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


class Collecting(Classifier):
    """Computes metrics with the given names at the end of every epoch."""

    names: ClassVar[tuple[str, ...]]

    def on_train_epoch_end(self):
        self.results = {name: getattr(self, name).compute() for name in self.names}
        self.results = {
            name: value.clone() if hasattr(value, "clone") else value for name, value in self.results.items()
        }
        for name in self.names:
            getattr(self, name).reset()


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


class Perplexity(torchmetrics.Metric):
    """Is given a sum and how many terms it has."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("terms", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, total, terms):
        self.total += total
        self.terms += terms

    def compute(self):
        return (self.total / self.terms).exp()


class Powered(OwnMetric):
    def update(self, values, power):
        super().update(values**power)


class Texts(torchmetrics.Metric):
    """Is given one text after the other, and its states have no reduction, as those of ROUGE."""

    def __init__(self):
        super().__init__()
        self.add_state("lengths", [], dist_reduce_fx=None)

    def update(self, text, kind="word"):
        self.lengths.append(torch.tensor(len(text)))

    def compute(self):
        return torch.stack(self.lengths)


class GivenScalars(Collecting):
    names = ("right", "highest", "perplexity", "powered", "texts")

    def __init__(self):
        super().__init__()
        self.right, self.highest = torchmetrics.SumMetric(), torchmetrics.MaxMetric()
        self.perplexity, self.powered, self.texts = Perplexity(), Powered(), Texts()

    def training_step(self, batch, batch_idx):
        features, labels = batch
        logits = self.network(features)
        self.right.update((logits.argmax(-1) == labels).double().sum())
        self.highest.update(features.max())
        losses = functional.cross_entropy(logits, labels, reduction="none").detach()
        self.perplexity.update(losses.sum(), len(losses))
        self.powered.update(features[:, 0], 3)
        for label in labels.tolist():
            self.texts.update("x" * label, kind="word")
        return functional.cross_entropy(logits, labels)


class Nested(Collecting):
    """Metrics that are parts of others, and one that is emptied in the step."""

    names = ("mse", "mae", "product", "recent", "inner", "extremes")

    def __init__(self):
        super().__init__()
        self.mse, self.mae = torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()
        self.product = 2 * self.mse * self.mae
        self.extremes = torchmetrics.MinMaxMetric(self.mae)
        self.inner = torchmetrics.MeanAbsoluteError()
        self.outer = torchmetrics.MinMaxMetric(self.inner)
        self.recent = torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        features, labels = batch
        self.mse.update(features[:, 0], features[:, 1])
        self.mae.update(features[:, 2], features[:, 3])
        self.inner.update(features[:, 0], features[:, 1])
        self.outer.update(features[:, 2], features[:, 3])
        if batch_idx == 2:
            self.recent.reset()
        self.recent.update(features[:, 0])
        return functional.cross_entropy(self.network(features), labels)


class Weighted(torchmetrics.Metric):
    """Is given a target and the weights of its samples in one list."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("weight", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, prediction, columns):
        target, weight = columns
        weight = torch.ones_like(target) if weight is None else weight
        self.total = self.total + ((prediction - target).abs() * weight).sum()
        self.weight = self.weight + weight.sum()

    def compute(self):
        return self.total / self.weight


class CalledTwice(Collecting):
    names = ("columns", "samples", "twice", "total")

    def __init__(self):
        super().__init__()
        self.columns, self.samples = Weighted(), Weighted()
        self.twice, self.total = torchmetrics.MeanSquaredError(), torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        features, labels = batch
        for factor in (1.0, 2.0):
            self.columns(factor * features[:, 0], [features[:, 1], features[:, 2].abs()])
            for row in features:
                self.samples(row[:1], [factor * row[1:2], None])
            self.total(factor * features[:, 0])
            value = self.twice(factor * features[:, 0], features[:, 1])
        self.log("second", value, on_step=True, on_epoch=True)
        return functional.cross_entropy(self.network(features), labels)


class Multioutput(Collecting):
    """Metrics whose states get one value per output, and metrics in a list inside another."""

    names = ("r2", "explained", "separate", "correlated")

    def __init__(self):
        super().__init__()
        self.r2 = torchmetrics.R2Score(multioutput="raw_values")
        self.explained = torchmetrics.ExplainedVariance(multioutput="raw_values")
        self.separate = torchmetrics.MultioutputWrapper(torchmetrics.R2Score(), CLASSES)
        self.correlated = torchmetrics.MultioutputWrapper(torchmetrics.PearsonCorrCoef(), CLASSES)

    def training_step(self, batch, batch_idx):
        features, labels = batch
        logits = self.network(features)
        for name in self.names:
            value = getattr(self, name)(logits.detach(), features[:, :CLASSES])
            self.log_dict({f"{name}{output}": item for output, item in enumerate(value)}, on_step=True, on_epoch=False)
        return functional.cross_entropy(logits, labels)


@pytest.mark.parametrize(
    ("model", "tolerance"), [(GivenScalars, 1e-9), (Nested, 1e-9), (CalledTwice, 1e-6), (Multioutput, 1e-6)]
)
@pytest.mark.parametrize(("split", "devices"), [([1, 1], 2), ([2, 6], 2), ([2, 3, 3], 3)])
def test_metrics_equal_one_device_however_a_step_calls_them(model, tolerance, split, devices):
    def run(strategy, devices):
        trainer = quiet_trainer(strategy, devices, precision="64-true", max_epochs=2)
        module = seeded(model)
        trainer.fit(module, DataLoader(dataset(27 if model is not Multioutput else 32), batch_size=8))
        return {**module.results, **trainer.callback_metrics}

    found, expected = run(BalancedDataParallelStrategy(split=split), devices), run("auto", 1)
    assert found.keys() == expected.keys()
    assert len(expected) >= len(model.names) > 3
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)

"""The module's metrics equal those of one device, whichever replicas update them."""

import functools
import threading
from typing import ClassVar

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

from tests.support.training import CLASSES, Classifier, balanced, batches, log_values, seeded, train


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
    """Computes the metrics with the given names at the end of every epoch."""

    names: ClassVar[tuple[str, ...]]

    def on_train_epoch_end(self):
        metrics = {name: self.get_submodule(name) for name in self.names}
        values = {name: metric.compute() for name, metric in metrics.items()}
        self.results = {k: value.clone() if isinstance(value, torch.Tensor) else value for k, value in values.items()}
        self.counts = {name: m.update_count for name, m in self.named_modules() if isinstance(m, torchmetrics.Metric)}
        for metric in metrics.values():
            metric.reset()


class Measured(Collecting):
    names = ("scalar", "weighted", "total", "smallest", "kept", "pearson", "own", "wrapped", "named.auroc")

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


def run(model, strategy="auto", devices=1):
    """Return the module, the values that it logs in every step, and its results and metrics at the end."""
    module, steps, metrics = log_values(model, strategy, devices, 32 if model is Multioutput else 27)
    return module, steps, {**getattr(module, "results", {}), **metrics}


run_alone = functools.cache(run)


def test_the_test_fails_when_a_mean_is_not_weighted():
    _, _, found = run(Measured, balanced([2, 6], weight_by="equal"), 2)
    assert abs(found["scalar"] - run_alone(Measured)[2]["scalar"]) > 1e-4


def test_metrics_with_hooks_bound_to_the_module_are_copied():
    calls = []

    class Watched(Classifier):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()  # cannot be copied
            self.accuracy.register_forward_hook(self.count)

        def count(self, *args):
            with self.lock:
                calls.append("called")

    train(seeded(Watched), "balanced_dp", 2, loader=batches(16), max_epochs=1)
    assert len(calls) == 4


class LogsForwardValues(Classifier):
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


class Ratio(torchmetrics.Metric):
    """A sum of values divided by their number, as the ELBO of a variational autoencoder."""

    full_state_update = False

    def __init__(self, key):
        super().__init__()
        self.key = key
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("number", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, *, number, **totals):
        self.total += totals[self.key]
        self.number += number

    def compute(self):
        return self.total / self.number


class Composed(Collecting):
    names = ("called",)

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Ratio("loss"), Ratio("penalty")])
        self.sum = self.parts[0] + self.parts[1]
        self.called = Ratio("loss") + Ratio("penalty")

    def training_step(self, batch, batch_idx):
        features, labels = batch
        losses = functional.cross_entropy(self.network(features), labels, reduction="none")
        totals = {"loss": losses.detach().sum(), "penalty": features.square().sum(), "number": len(labels)}
        self.sum.update(**totals)
        self.log_dict({"sum": self.sum, "part": self.parts[1]}, on_epoch=True, on_step=False)
        self.log("value", self.called(**totals))
        return losses.mean()


def test_metrics_outside_of_the_module_tree_are_warned_about():
    class Hidden(Classifier):
        def __init__(self):
            super().__init__()
            self.losses = [torchmetrics.MeanMetric()]

    with pytest.warns(UserWarning, match=r"`self.losses` holds a metric that is no submodule"):
        train(seeded(Hidden), balanced(), 2, max_steps=1)


class Perplexity(torchmetrics.Metric):
    """Takes a sum and the number of its terms."""

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
    """Takes one text after the other; like ROUGE, it has states without reduction."""

    def __init__(self):
        super().__init__()
        self.add_state("lengths", [], dist_reduce_fx=None)

    def update(self, text, kind="word"):
        self.lengths.append(torch.tensor(len(text)))

    def compute(self):
        return torch.stack(self.lengths)


class Weighted(torchmetrics.Metric):
    """Takes a target and the weights of its samples in one list."""

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


class CalledInManyWays(Collecting):
    """Given scalars, texts and lists, called twice, reset in the step, and parts of other metrics."""

    names = (
        "right", "highest", "perplexity", "powered", "texts", "mse", "mae", "product", "extremes", "inner", "recent",
        "columns", "samples", "twice", "total",
    )  # fmt: skip

    def __init__(self):
        super().__init__()
        self.right, self.highest = torchmetrics.SumMetric(), torchmetrics.MaxMetric()
        self.perplexity, self.powered, self.texts = Perplexity(), Powered(), Texts()
        self.mse, self.mae = torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()
        self.product = 2 * self.mse * self.mae
        self.extremes = torchmetrics.MinMaxMetric(self.mae)
        self.inner = torchmetrics.MeanAbsoluteError()
        self.outer = torchmetrics.MinMaxMetric(self.inner)
        self.recent = torchmetrics.SumMetric()
        self.columns, self.samples = Weighted(), Weighted()
        self.twice, self.total = torchmetrics.MeanSquaredError(), torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        features, labels = batch
        first, second, third, fourth, _ = features.unbind(1)
        logits = self.network(features)
        self.right.update((logits.argmax(-1) == labels).double().sum())
        self.highest.update(features.max())
        losses = functional.cross_entropy(logits, labels, reduction="none").detach()
        self.perplexity.update(losses.sum(), len(losses))
        self.powered.update(first, 3)
        for label in labels.tolist():
            self.texts.update("x" * label, kind="word")
        self.mse.update(first, second)
        self.mae.update(third, fourth)
        self.inner.update(first, second)
        self.outer.update(third, fourth)
        if batch_idx == 2:
            self.recent.reset()
        self.recent.update(first)
        for factor in (1.0, 2.0):
            self.columns(factor * first, [second, third.abs()])
            for row in features:
                self.samples(row[:1], [factor * row[1:2], None])
            self.total(factor * first)
            value = self.twice(factor * first, second)
        self.log("second", value, on_step=True, on_epoch=True)
        return functional.cross_entropy(logits, labels)


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


FEW, EACH = [(2, 6), (0, 8), (2, 3, 3)], [(1, 1), (2, 3, 3)]
# The splits with which each module is trained, and at least how many values it has at the end.
MODELS = {
    Measured: ([*FEW, (7, 1)], 15), LogsForwardValues: (FEW, 26), Composed: (FEW, 4), CalledInManyWays: (EACH, 15),
    Multioutput: (EACH, 4),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets", "ignore:Average precision score")
@pytest.mark.parametrize(
    ("model", "split"), [(model, split) for model, (every, _) in MODELS.items() for split in every]
)
def test_metrics_and_values_returned_by_forward_equal_one_device_however_a_step_calls_them(model, split):
    module, steps, found = run(model, balanced(split), len(split))
    alone, steps_alone, expected = run_alone(model)
    assert found.keys() == expected.keys()
    assert len(expected) >= MODELS[model][1]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)
    for step, step_alone in zip(steps, steps_alone, strict=True):
        assert step == pytest.approx(step_alone, abs=1e-9)
    if model is Measured:
        assert module.counts == alone.counts
        assert module.grouped.compute_groups == alone.grouped.compute_groups
        assert len(module.grouped.compute_groups) < 3

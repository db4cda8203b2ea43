"""What steps do to metrics beside updating them with tensors."""

import pytest
import torch
import torchmetrics
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy
from tests.parity import dataset, quiet_trainer, seeded
from tests.replicas.test_metrics import Measured, OwnMetric


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


class GivenScalars(Measured):
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

    def on_train_epoch_end(self):
        metrics = self.right, self.highest, self.perplexity, self.powered, self.texts
        self.results = {type(metric).__name__: metric.compute().clone() for metric in metrics}
        for metric in metrics:
            metric.reset()


def results_of(model, split, devices):
    """What the metrics of a model compute, on replicas and on one device."""

    def results(strategy, devices):
        trainer = quiet_trainer(strategy, devices, precision="64-true", max_epochs=2)
        module = seeded(model)
        trainer.fit(module, DataLoader(dataset(27), batch_size=8))
        return module.results

    return results(BalancedDataParallelStrategy(split=split), devices), results("auto", 1)


@pytest.mark.parametrize(("split", "devices"), [([1, 1], 2), ([2, 6], 2), ([2, 3, 3], 3)])
def test_sums_counts_options_and_texts_are_taken_for_what_they_are(split, devices):
    found, expected = results_of(GivenScalars, split, devices)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


class Nested(Measured):
    """Metrics that are parts of others, and one that is emptied in the step."""

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

    def on_train_epoch_end(self):
        metrics = {
            "mse": self.mse, "mae": self.mae, "product": self.product, "recent": self.recent, "inner": self.inner
        }  # fmt: skip
        self.results = {name: metric.compute().clone() for name, metric in metrics.items()}
        self.results["extremes"] = self.extremes.compute()["max"]
        for metric in metrics.values():
            metric.reset()


@pytest.mark.parametrize(("split", "devices"), [([1, 1], 2), ([2, 6], 2)])
def test_metrics_within_others_and_metrics_that_a_step_empties(split, devices):
    found, expected = results_of(Nested, split, devices)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


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


class Uneven(Weighted):
    """Is given a list of tensors that are no columns, one entry for each value above zero."""

    def update(self, prediction, values):
        self.total = self.total + torch.stack([*values, prediction.sum() * 0]).sum()
        self.weight = self.weight + len(values)


class CalledTwice(Measured):
    def __init__(self):
        super().__init__()
        self.weighted, self.unweighted, self.samples, self.uneven = Weighted(), Weighted(), Uneven(), Uneven()
        self.twice = torchmetrics.MeanSquaredError()

    def training_step(self, batch, batch_idx):
        features, labels = batch
        for factor in (1.0, 2.0):
            self.weighted(factor * features[:, 0], [features[:, 1], features[:, 2].abs()])
            value = self.twice(factor * features[:, 0], features[:, 1])
            self.unweighted(factor * features[:, 0], [features[:, 1], None])
            self.samples(features[:, 0], list(factor * features[:, 1]))
            self.uneven(features[:, 0], list(factor * features[features[:, 3] > 0, 1]))
        self.log("second", value, on_step=False, on_epoch=True)
        return functional.cross_entropy(self.network(features), labels)

    def on_train_epoch_end(self):
        metrics = {name: getattr(self, name) for name in ("weighted", "unweighted", "samples", "uneven")}
        self.results = {name: metric.compute().clone() for name, metric in metrics.items()}
        self.results["second"] = self.trainer.callback_metrics["second"]
        for metric in metrics.values():
            metric.reset()


@pytest.mark.parametrize(("split", "devices"), [([1, 1], 2), ([2, 6], 2), ([2, 3, 3], 3)])
def test_metrics_called_twice_in_a_step_with_lists_of_columns_and_of_samples(split, devices):
    found, expected = results_of(CalledTwice, split, devices)
    assert len(expected) == 5
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)

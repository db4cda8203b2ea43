"""Fails when a private name of torchmetrics moves that `_compat` relies on."""

from contextlib import ExitStack

import torch
import torchmetrics
from torchmetrics import Metric, MetricCollection

from lightning_ddp_ext._compat import torchmetrics as compat_torchmetrics


def test_moving_a_metric_keeps_its_dtype():
    metric = torchmetrics.SumMetric()
    try:
        torch.set_default_dtype(torch.float64)
        compat_torchmetrics.move_keeping_dtype(metric, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert metric.dtype == torch.float32


def test_compute_groups_are_given_up_and_formed():
    collection = MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError(squared=False)][:1])
    compat_torchmetrics.forget_compute_groups(collection)
    compat_torchmetrics.restore_compute_groups(collection, form=True)
    collection.update(torch.rand(3), torch.rand(3))
    assert not collection._groups_checked
    grouped = MetricCollection({"a": torchmetrics.MeanSquaredError(), "b": torchmetrics.MeanSquaredError()})
    for metric in grouped.values(copy_state=False):
        metric.update(torch.ones(3), torch.zeros(3))
    compat_torchmetrics.restore_compute_groups(grouped, form=True)
    assert grouped.compute_groups == {0: ["a", "b"]}
    assert isinstance(grouped["a"], Metric)


def test_list_states_are_found_and_concatenated_and_computed_values_forgotten():
    metric = torchmetrics.CatMetric()
    assert compat_torchmetrics.list_states(metric) == {"value": []}
    metric.update(torch.ones(2))
    metric.update(torch.zeros(1))
    (states,) = compat_torchmetrics.list_states(metric).values()
    assert [entry.tolist() for entry in states] == [[1, 1, 0]]
    metric.compute()
    metric.value[0].zero_()
    assert metric.compute().tolist() == [1, 1, 0]
    compat_torchmetrics.forget_computed(metric)
    assert metric.compute().tolist() == [0, 0, 0]


def test_synchronisation_of_metrics_is_followed(group):
    seen = []

    def around(metric, synchronize, gather, ranks):
        seen.append((type(metric), ranks))
        synchronize(gather)

    metric = torchmetrics.CatMetric()
    metric.update(torch.ones(2))
    with ExitStack() as cleanup:
        compat_torchmetrics.watch_synchronization(cleanup, around)
        assert metric.compute().tolist() == [1, 1]
    compat_torchmetrics.forget_computed(metric)
    assert metric.compute().tolist() == [1, 1]
    assert seen == [(torchmetrics.CatMetric, None)]

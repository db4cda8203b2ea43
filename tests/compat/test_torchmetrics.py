"""Fails when a private name of torchmetrics moves that `_compat` relies on."""

from contextlib import ExitStack

import torch
import torchmetrics
from torchmetrics import Metric, MetricCollection

from lightning_ddp_ext._compat import torchmetrics as compat_torchmetrics
from lightning_ddp_ext.replicas.metrics import has_mergeable_state, merge_states


def test_states_of_metrics_are_merged_in_order_and_written():
    metric, other = torchmetrics.CatMetric(), torchmetrics.CatMetric()
    metric.update(torch.tensor([1.0, 2.0]))
    other.update(torch.tensor([3.0]))
    assert has_mergeable_state(metric)
    state = merge_states(metric, [compat_torchmetrics.read_state(m) for m in (metric, other)])
    compat_torchmetrics.write_state(metric, state, updates=1)
    assert metric.compute().tolist() == [1, 2, 3]
    assert metric.update_count == 2
    unmergeable = [torchmetrics.PearsonCorrCoef(), torchmetrics.MinMaxMetric(torchmetrics.MeanSquaredError())]
    assert not any(map(has_mergeable_state, unmergeable))


def test_a_metric_computes_over_another_state_and_keeps_its_own():
    metric, other = torchmetrics.SumMetric(), torchmetrics.SumMetric()
    metric.update(1.0)
    other.update(5.0)
    assert compat_torchmetrics.compute_over(metric, compat_torchmetrics.read_state(other)) == 5
    assert metric.compute() == 1
    assert metric.update_count == 1


def test_the_last_forward_value_can_be_read_and_set():
    metric = torchmetrics.SumMetric()
    metric.update(1.0)
    assert compat_torchmetrics.last_forward_value(metric) is None
    metric(2.0)
    assert compat_torchmetrics.last_forward_value(metric) == 2
    compat_torchmetrics.set_forward_value(metric, torch.tensor(7.0))
    assert metric._forward_cache == 7


def test_outermost_calls_of_a_metric_are_recorded():
    calls = []
    metric = torchmetrics.PearsonCorrCoef()  # its forward calls its update
    compat_torchmetrics.record_calls(metric, lambda name, args, kwargs: calls.append(name) or (lambda result: 7), [0])
    assert metric(torch.rand(4), torch.rand(4)) == 7
    metric.update(torch.rand(4), torch.rand(4))
    assert calls == ["forward", "update"]


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

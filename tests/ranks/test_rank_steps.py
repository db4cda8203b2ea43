"""Means over ranks of values that a step logs, in one process that plays all ranks."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer

from lightning_ddp_ext.ranks.rank_steps import RankContext, WeightedSteps
from lightning_ddp_ext.ranks.sample_counts import BatchSamples, sums_and_means


class Batch:
    """A batch with a weight; its step logs a value and returns the logged mean."""

    def __init__(self, value, weight):
        self.value, self.weight = value, weight


@pytest.fixture
def steps():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False)
    trainer.strategy._lightning_module = LightningModule()
    samples = BatchSamples(0)
    samples.weight = lambda batch: batch.weight
    steps = WeightedSteps(RankContext(trainer, samples, None, None, None))
    yield steps
    steps.close()


def by_lightning(tensor, group, reduce_op):
    return "by Lightning", reduce_op


def log(steps, value, operation="mean"):
    """Log a value, and return the result of its reduction."""
    found = []
    steps._log("loss", None, lambda: found.append(steps.reduce(torch.tensor(value), None, operation, by_lightning)))
    return found[0]


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1.0, 4.0], [2.0, 1.0], 2.0),
        ([math.nan, 4.0], [0.0, 1.0], 4.0),  # a mean over nothing
        ([1.0, 4.0], [0.0, 0.0], 2.5),
        ([1.0, 4.0], [math.nan, 7.0], 2.5),  # one rank cannot count its samples
    ],
)
def test_logged_values_of_steps_are_weighted(steps, monkeypatch, values, weights, expected):
    sent = []
    batches = [Batch(*pair) for pair in zip(values, weights, strict=True)]

    def run_steps(all_reduce):
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        return [steps.evaluation_step(batch, lambda: log(steps, batch.value)) for batch in batches]  # noqa: B023

    run_steps(lambda part, operation, group: sent.append(part.clone()))
    found = run_steps(lambda part, operation, group: part.copy_(sum(sent)))
    assert [value.item() for value in found] == [expected, expected]
    assert found[0].dtype == torch.float32


def test_a_rank_without_values_is_in_no_mean_and_no_sum():
    values, sent = torch.tensor([1.0, 6.0]), []
    for own, weight in ((values, 0.0), (3 * values, 0.0), (torch.full((2,), math.nan), None)):
        sums_and_means(own, weight, lambda part: sent.append(part) or part)
    sums, means = sums_and_means(values, 0.0, lambda part: sum(sent))
    assert sums.tolist() == [4.0, 24.0]
    assert means.tolist() == [2.0, 12.0]


def test_sums_and_extremes_are_reduced_without_a_barrier(steps, monkeypatch):
    """The host would wait in the barrier of Lightning's function."""
    sent = []
    monkeypatch.setattr(dist, "all_reduce", lambda part, operation, group: sent.append(operation))
    for operation in ("sum", "max", "min"):
        assert steps.evaluation_step(Batch(1.0, 2.0), lambda: log(steps, 3.0, operation)) == 3.0  # noqa: B023
    assert sent == [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN]


def test_lightning_reduces_all_other_values(steps):
    reduce = partial(steps.reduce, torch.ones(()), None, "mean", by_lightning)
    assert steps.evaluation_step(Batch(1.0, 2.0), reduce) == ("by Lightning", "mean")
    assert log(steps, 1.0) == ("by Lightning", "mean")  # outside of a step

"""Means over ranks of values that a step logs, in one process that plays all ranks."""

import math

import pytest
import torch
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


def log(steps, value, add_up):
    """Log a value whose reduction by Lightning is `add_up`; return the result."""
    found = []
    tensor = torch.tensor(value)
    steps._log("loss", None, lambda: found.append(steps.reduce(tensor, None, "mean", lambda *args: add_up(args[0]))))
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
def test_logged_values_of_steps_are_weighted(steps, values, weights, expected):
    sent = []
    batches = [Batch(*pair) for pair in zip(values, weights, strict=True)]

    def run_steps(add_up):
        return [steps.evaluation_step(batch, lambda: log(steps, batch.value, add_up)) for batch in batches]  # noqa: B023

    run_steps(lambda part: sent.append(part) or part)
    found = run_steps(lambda part: sum(sent))
    assert [value.item() for value in found] == [expected, expected]
    assert found[0].dtype == torch.float32


def test_a_rank_without_values_is_in_no_mean_and_no_sum():
    values, sent = torch.tensor([1.0, 6.0]), []
    for own, weight in ((values, 0.0), (3 * values, 0.0), (torch.full((2,), math.nan), None)):
        sums_and_means(own, weight, lambda part: sent.append(part) or part)
    sums, means = sums_and_means(values, 0.0, lambda part: sum(sent))
    assert sums.tolist() == [4.0, 24.0]
    assert means.tolist() == [2.0, 12.0]


def test_lightning_reduces_all_other_values(steps):
    tensor, reduce = torch.ones(()), lambda tensor, group, reduce_op: ("Lightning's", reduce_op)
    assert steps.evaluation_step(Batch(1.0, 2.0), lambda: steps.reduce(tensor, None, "mean", reduce))[1] == "mean"
    assert log(steps, 1.0, lambda part: "outside of a step") == "outside of a step"

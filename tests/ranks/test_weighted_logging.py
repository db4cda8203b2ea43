"""Means over ranks of values that a step logs, in one process that plays all ranks."""

import math

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_ddp_ext.ranks.sample_counts import BatchSamples, WeightedLogging, sums_and_means


@pytest.fixture
def logging():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False)
    logging = WeightedLogging(trainer, BatchSamples(0))
    yield logging
    logging.close()


def averages(logging, values, weights):
    """What each rank finds, if all log in a step."""
    sent, found = [], []

    def log(value, weight, add_up):
        with logging.step(weight):
            logging._update("loss", None, lambda: found.append(logging.average(torch.tensor(value), add_up)))

    for value, weight in zip(values, weights, strict=True):
        log(value, weight, lambda part: sent.append(part) or part)
    found.clear()
    for value, weight in zip(values, weights, strict=True):
        log(value, weight, lambda part: sum(sent))
    return found


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1.0, 4.0], [2.0, 1.0], 2.0),
        ([math.nan, 4.0], [0.0, 1.0], 4.0),  # a mean over nothing
        ([1.0, 4.0], [0.0, 0.0], 2.5),
        ([1.0, 4.0], [math.nan, 7.0], 2.5),  # one rank cannot count its samples
    ],
)
def test_values_of_steps_are_weighted(logging, values, weights, expected):
    found = averages(logging, values, weights)
    assert [value.item() for value in found] == [expected, expected]
    assert found[0].dtype == torch.float32


def test_a_rank_without_values_is_in_no_mean_and_no_sum():
    values, sent = torch.tensor([1.0, 6.0]), []
    for own, weight in ((values, 0.0), (3 * values, 0.0), (torch.full((2,), math.nan), None)):
        sums_and_means(own, weight, lambda part: sent.append(part) or part)
    sums, means = sums_and_means(values, 0.0, lambda part: sum(sent))
    assert sums.tolist() == [4.0, 24.0]
    assert means.tolist() == [2.0, 12.0]


def test_anything_else_is_left_to_lightning(logging):
    with logging.step(2.0):
        assert logging.average(torch.ones(()), sum) is None  # the step itself reduces a tensor
    found = []
    logging._update("hook", None, lambda: found.append(logging.average(torch.ones(()), sum)))
    assert found == [None]

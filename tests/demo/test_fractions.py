"""`train_fractions` deals out every sample to exactly one rank."""

import itertools
import re

import pytest
from torch.utils.data import DistributedSampler

from lightning_ddp_ext.demo.digits import FractionSampler


def parts(size, fractions):
    world_size = len(fractions)
    return [list(FractionSampler(range(size), fractions, world_size, rank)) for rank in range(world_size)]


FRACTIONS = [[1.0], [0.7, 0.3], [0.0, 1.0], [1 / 3, 1 / 3, 1 / 3], [0.1, 0.2, 0.3, 0.4]]


def test_every_sample_belongs_to_exactly_one_rank():
    for fractions, size in itertools.product(FRACTIONS, (0, 1, 2, 7, 10, 101)):
        dealt = parts(size, fractions)
        assert sorted(index for part in dealt for index in part) == list(range(size))
        for part, fraction in zip(dealt, fractions, strict=True):
            assert abs(len(part) - fraction * size) <= 1


def test_parts_are_consecutive_and_each_epoch_shuffles_them():
    assert [sorted(part) for part in parts(10, [0.7, 0.3])] == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9]]
    sampler = FractionSampler(range(40), [0.5, 0.5], 2, 1, seed=3)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20, 40))
    assert len(sampler) == 20
    assert isinstance(sampler, DistributedSampler)  # so Lightning leaves it alone


def test_fractions_that_do_not_fit_are_refused():
    cases = {
        (0.7, 0.2): "must add up to 1, got [0.7, 0.2], which adds up to 0.9",
        (): "must add up to 1, got [], which adds up to 0",
        (1.5, -0.5): "must be between 0 and 1, got [1.5, -0.5]",
        (0.5, 0.25, 0.25): "must have one number per process, got [0.5, 0.25, 0.25] for 2 processes",
    }
    for fractions, message in cases.items():
        with pytest.raises(ValueError, match=re.escape(f"`train_fractions` {message}")):
            FractionSampler(range(10), fractions, 2, 0)

"""Simulated runs of the controller of shares, with noise and without processes."""

import math
import random
from statistics import fmean

import pytest

from lightning_ddp_ext.batches.balance_controller import BalanceController

RUNS = 1000


class Rank:
    """Times of a normal distribution on a logarithmic scale; one batch in twenty takes up to twice as long."""

    def __init__(self, per_sample, fixed, noise, numbers):
        self.per_sample, self.fixed, self.noise, self.numbers = per_sample, fixed, noise, numbers

    def usual(self, samples):
        return self.fixed + samples * self.per_sample

    def seconds(self, samples):
        slower = 1 + self.numbers.random() if self.numbers.random() < 0.05 else 1
        return self.usual(samples) * math.exp(self.numbers.gauss(0, self.noise)) * slower


def best(ranks, batch_size):
    """Return the shortest time of a batch: each sample in turn goes to the rank that then needs the least time."""
    sizes = [1] * len(ranks)
    for _ in range(batch_size - len(ranks)):
        number = min(range(len(ranks)), key=lambda one: ranks[one].usual(sizes[one] + 1))
        sizes[number] += 1
    return slowest(ranks, sizes)


def slowest(ranks, sizes):
    return max(rank.usual(samples) for rank, samples in zip(ranks, sizes, strict=True))


def excess(controller, ranks, batch_size):
    """Return by how much the present sizes are slower than the best ones."""
    return slowest(ranks, controller.split_sizes(batch_size)) / best(ranks, batch_size) - 1


def step(controller, ranks, batch_size):
    sizes = controller.split_sizes(batch_size)
    controller.observe(sizes, [rank.seconds(samples) for rank, samples in zip(ranks, sizes, strict=True)])


def after_ten_decisions(seed, number, monkeypatch):
    numbers = random.Random(seed)
    batch_size, noise = numbers.choice([32, 64, 128]), numbers.choice([0.02, 0.05, 0.1])
    speeds = [numbers.uniform(1, 4) for _ in range(number)]
    fixed = numbers.choice([0, 0.1, 0.3]) * batch_size / number * fmean(speeds)
    ranks = [Rank(speed, fixed, noise, numbers) for speed in speeds]
    controller, decisions = BalanceController(number), []
    decide = controller._decide
    monkeypatch.setattr(controller, "_decide", lambda window: (decisions.append(1), decide(window))[1])
    while len(decisions) < 10:
        step(controller, ranks, batch_size)
    return excess(controller, ranks, batch_size)


@pytest.mark.parametrize(("ranks", "runs", "good"), [(2, RUNS, 0.95), (4, RUNS // 4, 0.93)])
def test_ten_decisions_find_the_best_division(ranks, runs, good, monkeypatch):
    found = [after_ten_decisions(seed, ranks, monkeypatch) for seed in range(runs)]
    assert sum(one <= 0.03 for one in found) >= good * len(found)
    assert max(found) <= 0.10


def test_speeds_that_swap_are_followed_in_15_batches():
    late = 0
    for seed in range(RUNS):
        numbers = random.Random(seed)
        noise, fixed = numbers.choice([0.01, 0.02]), numbers.choice([0, 16])
        ranks = [Rank(3, fixed, noise, numbers), Rank(1, fixed, noise, numbers)]
        controller = BalanceController(2)
        for _ in range(numbers.randint(60, 400)):
            step(controller, ranks, 64)
        ranks.reverse()
        for _ in range(15):
            step(controller, ranks, 64)
        late += excess(controller, ranks, 64) > 0.05
    assert late <= 0.01 * RUNS

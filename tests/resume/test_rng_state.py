import random

import numpy
import pytest
import torch

from lightning_ddp_ext.resume.rng_state import SharedRandomNumbers, capture_rng_state, restore_rng_state


def draw():
    of_numpy = numpy.random.standard_normal(), numpy.random.rand()
    return [random.gauss(0, 1), random.random(), *of_numpy, *torch.rand(3).tolist()]


def test_the_same_numbers_come_again():
    for _ in range(2):  # the second time, a Gaussian number is kept for the next call
        random.gauss(0, 1)
        numpy.random.standard_normal()
        states = capture_rng_state()
        drawn = draw()
        assert draw() != drawn
        restore_rng_state(states)
        assert draw() == drawn


def numbers_of_a_step(shared, seed, number=0):
    """Draw around and within a step; ranks differ in their seeds."""
    torch.manual_seed(seed)
    drawn = {"before": torch.rand(())}
    with shared.shared(number):
        drawn["step"] = torch.rand(())
        with shared.own():
            drawn["closure"] = torch.rand(())
            with shared.shared(number + 1):
                drawn["inner step"] = torch.rand(())
        drawn["step, again"] = torch.rand(())
    drawn["after"] = torch.rand(())
    return {name: float(value) for name, value in drawn.items()}


def test_shared_numbers_are_those_of_all_ranks_and_leave_no_trace_in_others():
    shared = SharedRandomNumbers(5)
    first, second = (numbers_of_a_step(shared, seed) for seed in (1, 2))
    own = ["before", "closure", "after"]
    for drawn, seed in ((first, 1), (second, 2)):
        torch.manual_seed(seed)
        assert [drawn[name] for name in own] == [float(torch.rand(())) for _ in own]
    common = first.keys() - set(own)
    assert {name: first[name] for name in common} == {name: second[name] for name in common}
    assert len(set(first.values())) == len(first)
    others = [numbers_of_a_step(shared, 1, 3), numbers_of_a_step(SharedRandomNumbers(6), 1)]
    assert len({drawn["step"] for drawn in (first, *others)}) == 3


def test_a_failure_leaves_a_rank_its_own_numbers():
    shared = SharedRandomNumbers(5)
    torch.manual_seed(1)
    expected = float(torch.rand(()))
    torch.manual_seed(1)
    with pytest.raises(ArithmeticError), shared.shared(0), shared.own():
        raise ArithmeticError
    assert float(torch.rand(())) == expected

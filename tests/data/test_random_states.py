import random

import numpy
import torch

from lightning_ddp_ext.data.random_states import capture_random_states, restore_random_states


def draw():
    of_numpy = numpy.random.standard_normal(), numpy.random.rand()
    return [random.gauss(0, 1), random.random(), *of_numpy, *torch.rand(3).tolist()]


def test_the_same_numbers_come_again():
    for _ in range(2):  # the second time, a Gaussian number is kept for the next call
        random.gauss(0, 1)
        numpy.random.standard_normal()
        states = capture_random_states()
        drawn = draw()
        assert draw() != drawn
        restore_random_states(states)
        assert draw() == drawn


def test_states_are_equally_long_whatever_is_kept():
    random.seed(0)
    before = capture_random_states()
    random.gauss(0, 1)
    assert capture_random_states().shape == before.shape

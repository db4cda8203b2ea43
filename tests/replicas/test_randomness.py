import warnings

import pytest
import torch

from lightning_ddp_ext.replicas.shared_state import SharedGenerator

CPU = torch.device("cpu")


def test_a_step_is_ordered_until_it_is_known_to_draw_nothing():
    generator = SharedGenerator([CPU, CPU])
    assert generator.forces_order("training_step")
    with generator.watch("training_step"):
        pass
    assert not generator.forces_order("training_step")
    assert generator.forces_order("validation_step")
    generator.forget()
    assert generator.forces_order("training_step")


def test_drawing_keeps_every_step_ordered_and_is_said_once():
    generator = SharedGenerator([CPU, CPU])
    with pytest.warns(UserWarning, match="`training_step` draws random numbers"), generator.watch("training_step"):
        torch.rand(1)
    assert generator.forces_order("training_step")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with generator.watch("training_step"):
            torch.rand(1)


def test_replicas_that_share_no_generator_are_never_ordered():
    for devices in ([CPU], [CPU, torch.device("meta")], [torch.device("cuda:0"), torch.device("cuda:1")]):
        generator = SharedGenerator(devices)
        with generator.watch("training_step"):
            torch.rand(1)
        assert not generator.forces_order("training_step")

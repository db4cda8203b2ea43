"""The control message, written and read without processes."""

from unittest import mock

import pytest
import torch

from lightning_ddp_ext.errors import RanksOutOfStepError
from lightning_ddp_ext.reducer import control
from lightning_ddp_ext.reducer.control import Control

RANKS = range(3)
MARKS = [bytearray([1, 0, 1]), bytearray([0, 0, 1]), bytearray([1, 0, 1])]


def make_controls():
    controls = []
    for rank in RANKS:
        with mock.patch.multiple(control.dist, get_rank=lambda group: rank, get_world_size=lambda group: len(RANKS)):  # noqa: B023
            controls.append(Control(None))
    return controls


def exchange(controls, dtype):
    sums = sum(one.write(marks, dtype) for one, marks in zip(controls, MARKS, strict=True))
    assert len(sums) == controls[0].length(3, dtype)
    return controls[1].read(sums)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_arrive_exactly_in_every_type_that_may_carry_them(dtype):
    assert Control.fits(dtype)
    controls, given = make_controls(), [[0.1, 1e-300, 3.0], [2.0**53 - 1, -1.0, 0.0]]
    fields = [[one.add() for _ in given] for one in controls]
    for rank, own in enumerate(fields):
        for number, field in enumerate(own):
            field.value = given[number][rank]
    assert exchange(controls, dtype) == [2, 0, 3]
    assert [list(field.of_ranks) for field in fields[1]] == given


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_rank_sends_at_most_twelve_bytes_for_a_number(dtype):
    one, *_ = make_controls()
    before = one.length(0, dtype)
    one.add()
    assert (one.length(0, dtype) - before) // len(RANKS) * dtype.itemsize <= 12


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.float8_e4m3fn])
def test_other_types_carry_nothing(dtype):
    assert not Control.fits(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ranks_with_other_numbers_of_synchronisations_are_named_first(dtype):
    controls, checked = make_controls(), []
    for rank, one in enumerate(controls):
        one.count.value = [6, 7, 8][rank]
        one.add(checked.append)
    with pytest.raises(RanksOutOfStepError, match=r"rank 1 makes its synchronisation 7 of .* of number 6, 8\."):
        exchange(controls, dtype)
    for one in controls:
        one.count.value = 7
    exchange(controls, dtype)
    assert checked == [(0.0, 0.0, 0.0)]  # on the rank that has read the message

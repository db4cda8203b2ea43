"""The message of control values, written and read without processes."""

from unittest import mock

import pytest
import torch

from lightning_ddp_ext.errors import RanksOutOfStepError
from lightning_ddp_ext.reducer import control
from lightning_ddp_ext.reducer.control import ControlMessage, RankFindings, StepControl

WORLD_SIZE = 3


def message_of(rank):
    with mock.patch.multiple(control.dist, get_rank=lambda group: rank, get_world_size=lambda group: WORLD_SIZE):
        return ControlMessage(None)


def found_on(rank, **changes):
    late, used, changed = bytearray([rank == 1, 0]), bytearray([1, rank == 2, 0]), bytearray([0, 1])
    findings = RankFindings([0.1, 1e-300, 3.0][rank], 7, 2**48 - 1 - rank, late, used, changed)
    return findings._replace(**changes)


def control_of(rank, position=2**52 + 1):
    return StepControl(
        position=position, stop=rank, has_next_batch=rank == 1, logged_keys=2**53 - 1 - rank, most_samples=rank - 1
    )


def exchange(dtype, found, controls):
    pairs = list(zip(found, controls, strict=True))
    sums = sum(message_of(rank).write(*pair, dtype) for rank, pair in enumerate(pairs))
    assert len(sums) == message_of(0).length(7, dtype)
    return message_of(1).read(sums, *pairs[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_arrive_exactly_in_every_type_that_may_carry_them(dtype):
    assert ControlMessage.fits(dtype)
    ranks = range(WORLD_SIZE)
    exchanged = exchange(dtype, list(map(found_on, ranks)), list(map(control_of, ranks)))
    assert list(exchanged.weights) == [0.1, 1e-300, 3.0]
    assert exchanged.total_weight == 0.1 + 1e-300 + 3.0
    assert exchanged.source == 0
    assert exchanged.stop == 2
    assert exchanged.has_next_batch == [False, True, False]
    assert list(exchanged.logged_keys) == [2**53 - 1 - rank for rank in ranks]
    assert list(exchanged.most_samples) == [-1, 0, 1]
    assert list(exchanged.structures) == [2**48 - 1 - rank for rank in ranks]
    assert (exchanged.late, exchanged.used, exchanged.changed) == ([1, 0], [3, 1, 0], [0, 3])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.float8_e4m3fn])
def test_other_types_carry_nothing(dtype):
    assert not ControlMessage.fits(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ranks_at_different_steps_are_named(dtype):
    ranks = range(WORLD_SIZE)
    controls = [control_of(0), control_of(1), control_of(2, position=4)]
    with pytest.raises(
        RanksOutOfStepError, match=rf"rank 1 synchronises .* at `control.position={2**52 + 1}`, .* `control.position=4`"
    ):
        exchange(dtype, list(map(found_on, ranks)), controls)
    found = [found_on(0, synchronizations=6), found_on(1), found_on(2, synchronizations=8)]
    with pytest.raises(RanksOutOfStepError, match=r"rank 1 makes its synchronisation 7 of .* of number 6, 8\."):
        exchange(dtype, found, list(map(control_of, ranks)))

from unittest import mock

import pytest
import torch

from lightning_ddp_ext.errors import RanksOutOfStepError
from lightning_ddp_ext.reducer import control as sync_control
from lightning_ddp_ext.reducer.control import RankReport, SyncControl

WORLD_SIZE = 3


def control(rank):
    with mock.patch.multiple(sync_control.dist, get_rank=lambda group: rank, get_world_size=lambda group: WORLD_SIZE):
        return SyncControl(None)


def report(rank, **changes):
    values = {
        "weight": [0.1, 1e-300, 3.0][rank],
        "stop": rank,
        "begun": 7,
        "position": 2**52 + 1,
        "notes": [2**53 - 1 - rank, 255 * rank],
        "structure": 2**48 - 1 - rank,
        "late": bytearray([rank == 1, 0]),
        "used": bytearray([1, rank == 2, 0]),
        "changed": bytearray([0, 1]),
    }
    return RankReport(**{**values, **changes})


def exchange(dtype, reports):
    sums = sum(control(rank).write(own, dtype) for rank, own in enumerate(reports))
    assert len(sums) == control(0).length(7, dtype)
    return control(1).read(sums, reports[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_reports_arrive_exactly_in_every_type_that_may_carry_them(dtype):
    assert SyncControl.can_travel_as(dtype)
    found = exchange(dtype, [report(rank) for rank in range(WORLD_SIZE)])
    assert list(found.weights) == [0.1, 1e-300, 3.0]
    assert found.total_weight == 0.1 + 1e-300 + 3.0
    assert found.source == 0
    assert found.stop == 2
    assert [list(notes) for notes in found.notes] == [[2**53 - 1 - rank, 255 * rank] for rank in range(WORLD_SIZE)]
    assert list(found.structures) == [2**48 - 1 - rank for rank in range(WORLD_SIZE)]
    assert (found.late, found.used, found.changed) == ([1, 0], [3, 1, 0], [0, 3])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.float8_e4m3fn])
def test_other_types_carry_nothing(dtype):
    assert not SyncControl.can_travel_as(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ranks_that_do_different_things_are_named(dtype):
    reports = [report(0), report(1), report(2, position=4)]
    with pytest.raises(RanksOutOfStepError, match=rf"rank 1 synchronises .* position {2**52 + 1}, others at 4\."):
        exchange(dtype, reports)
    reports = [report(0, begun=6), report(1), report(2, begun=8)]
    with pytest.raises(RanksOutOfStepError, match=r"rank 1 makes its synchronisation 7 of .* of number 6, 8\."):
        exchange(dtype, reports)

"""Ranks make the same steps, whatever lengths they have. One launch for each number of ranks."""

import pytest
import torch

from lightning_ddp_ext.errors import UnevenInputsError
from lightning_ddp_ext.join.lockstep_loader import number_of_steps
from tests.join import loader_ranks as ranks
from tests.support.processes import run_processes

LENGTHS = [(3, 3), (3, 1), (0, 2), (2, 0), (0, 0), (1, 4), (3, 1, 2), (0, 0, 2), (4, 4, 4), (0, 3, 0)]
OPTIONS = [{}, {"uneven_inputs": "stop"}, {"limit": 2}, {"skip": 1}, {"uneven_inputs": "stop", "limit": 1, "skip": 0}]
CASES = [(lengths, sized, options) for lengths in LENGTHS for sized in (True, False) for options in OPTIONS]
CASES += [(lengths, False, {**options, "flags_carried": True}) for lengths in LENGTHS for options in OPTIONS]


@pytest.fixture(scope="module")
def found():
    """What each rank did in each case."""
    results = {}
    for world_size in (2, 3):
        cases = [case for case in CASES if len(case[0]) == world_size]
        by_rank = run_processes(ranks.iterate, world_size, cases, timeout=180)
        results.update({repr(case): [of_rank[index] for of_rank in by_rank] for index, case in enumerate(cases)})
    return results


def expected_steps(lengths, rank, uneven_inputs="join", limit=100, skip=0, flags_carried=False):
    steps = min(limit, min(lengths) if uneven_inputs == "stop" else max(lengths))
    expected = []
    for step in range(skip, steps):
        active = tuple(other for other, length in enumerate(lengths) if length > step)
        if step < lengths[rank]:
            batch = f"{rank}.{step}"
        elif lengths[rank]:
            batch = f"{rank}.{lengths[rank] - 1}"  # the last one it had
        else:
            first = next(other for other, length in enumerate(lengths) if length > skip)
            batch = f"{first}.{skip}"  # the first one of another rank
        expected.append((batch, active, rank not in active, len(active) < len(lengths)))
    return expected


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_all_ranks_make_the_same_steps_and_see_each_batch_once(found, case):
    lengths, sized, options = case
    for rank, (epochs, left_out, asked) in enumerate(found[repr(case)]):
        expected = expected_steps(lengths, rank, **options)
        assert epochs == [expected, expected]
        if options.get("uneven_inputs") == "stop":
            steps = min(lengths)
            more = [
                min(length, options.get("limit", 100)) - min(steps, options.get("limit", 100)) for length in lengths
            ]
            assert (
                left_out == more if sized else all(found <= true for found, true in zip(left_out, more, strict=False))
            )
            assert any(left_out) == any(more)
        else:
            assert left_out == []
            assert asked <= 2 * lengths[rank]


def test_errors_name_the_rank_and_the_batch():
    cases = [
        ((3, 1), True, {"uneven_inputs": "error"}),
        ((3, 1), False, {"uneven_inputs": "error"}),
        ((2, 2), False, {"uneven_inputs": "error"}),
        ((3, 3), True, {"true_length": (2, 2)}),
    ]
    sized, unsized, even, wrong = zip(*run_processes(ranks.iterate, 2, cases, timeout=180), strict=True)
    for message in sized:
        assert "UnevenInputsError: rank 1 runs out of data after batch 1, while rank 0 has 3 batches" in message
    for message in unsized:
        assert "UnevenInputsError: rank 1 ran out of data after batch 1, other ranks have more" in message
    assert [len(epochs[0]) for epochs, _, _ in even] == [2, 2]
    for rank, message in enumerate(wrong):
        assert f"rank {rank}: the loader announced 3 batches and ended after 2" in message


def test_the_number_of_steps_of_equal_lengths_is_theirs():
    assert [number_of_steps([4, 4], way) for way in ("join", "stop", "error")] == [4, 4, 4]
    with pytest.raises(UnevenInputsError):
        number_of_steps([4, 3], "error")


def test_a_rank_without_data_is_given_a_batch_without_running_code():
    rank_0, rank_1 = run_processes(ranks.fill, 2, ["tensors", "opaque part", "opaque"], timeout=180)
    (((seen,), caught), ((partial,), caught_partial), (refused, _)) = rank_1
    assert torch.equal(seen["features"], torch.arange(6.0).reshape(2, 3))
    assert seen["names"] == ["a", "b"]
    assert caught == []
    assert torch.equal(partial["features"], torch.ones(2))
    assert partial["extra"] == [None]
    (warning,) = caught_partial
    assert "None instead of `Opaque` at `['extra'][0]`" in warning
    assert refused == rank_0[2][0]
    assert refused.startswith("UnsupportedFeatureError: rank 1 never had a batch that can be copied")
    assert refused.endswith("of tensors without gradients and what `copy.deepcopy` copies.")

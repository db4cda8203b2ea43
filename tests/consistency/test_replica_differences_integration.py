"""What one rank has of its own is found, named and measured, and nothing else is."""

import pytest

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def two(two_compared):
    return [compared.differences for compared in two_compared]


@pytest.fixture
def three(three_compared):
    return [compared.differences for compared in three_compared]


MESSAGES = {
    "flip_last_bit": "a, float32 [2, 3], of {}: 1 element differs, first at [1, 1] 4.00000048 instead of 4, by up to"
    " 4.77e-07 (relative 1.19e-07) (1 of 6 tensors differ)",
    "negate_zero": "b, bfloat16 [4], of {}: 1 element differs, first at [2] -0 instead of 0, by up to 0 (relative 0)"
    " (1 of 6 tensors differ)",
    "write_nan": "a, float32 [2, 3], of {}: 1 element differs, first at [0, 2] nan instead of 2, by up to nan"
    " (relative nan) (1 of 6 tensors differ)",
    "write_other_nan": "a, float32 [2, 3], of {}: 1 element differs, first at [0, 2] nan (0x7fc00001) instead of nan"
    " (0x7fc00000), by up to nan (relative nan) (1 of 6 tensors differ)",
    "count_one_more": "c, int64 [], of {}: 1 element differs, first 8 instead of 7, by up to 1 (relative 0.125)"
    " (1 of 6 tensors differ)",
    "change_sparse": "d, float32 sparse_coo [3, 3], of {}: 3 elements differ, first at [0, 0] 2 instead of 1, by up to"
    " 1 (relative 0.5) (1 of 6 tensors differ)",
    "flip_bool": "e, bool [2], of {}: 2 elements differ, first at [0] False instead of True, by up to 1 (relative 1)"
    " (1 of 6 tensors differ)",
    "change_complex": "f, complex64 [2], of {}: 1 element differs, first at [1] 3+1j instead of 3+0j, by up to 1"
    " (relative 0.316) (1 of 6 tensors differ)",
    "change_two": "a, float32 [2, 3], of {}: 6 elements differ, first at [0, 0] 1 instead of 0, by up to 1"
    " (relative 0.167) (2 of 6 tensors differ)",
}


@pytest.mark.parametrize("change", MESSAGES)
def test_the_tensor_the_rank_and_the_size_are_told(two, three, change):
    for found, of_whom in ((two, "rank 1 differs from rank 0"), (three, "rank 0 is not that of ranks 1, 2")):
        for difference in found:  # the same on every rank
            assert str(difference[change]) == MESSAGES[change].format(of_whom)


def test_ranks_with_other_tensors_are_named_instead_of_waited_for(two, three):
    for found in two:
        assert str(found["drop"]) == ("b is missing on rank 1, but bfloat16 [4] on rank 0 (1 of 6 tensors differ)")
        assert str(found["drop_all"]).startswith("a is missing on rank 1, but float32 [2, 3] on rank 0 (6 of 6 ")
        assert str(found["add_another"]) == "g is float32 [2] on rank 1, but missing on rank 0 (1 of 7 tensors differ)"
        assert str(found["reshape"]).startswith("a is float32 [3, 2] on rank 1, but float32 [2, 3] on rank 0 (1 of 6")
        assert str(found["convert"]).startswith("a is float64 [2, 3] on rank 1, but float32 [2, 3] on rank 0 (1 of 6")
    for found in three:
        assert str(found["drop"]).startswith("b is missing on rank 0, but bfloat16 [4] on ranks 1, 2 (1 of 6")
        assert str(found["add_another"]).startswith("g is float32 [2] on rank 0, but missing on ranks 1, 2 (1 of 7")


def test_equal_tensors_are_equal_in_any_order(two, three):
    for found in [*two, *three]:
        assert found["nothing"] is None
        assert found["reorder"] is None


def test_equal_tensors_cost_one_collective(two_compared):
    for equal, different in (compared.collectives for compared in two_compared):
        assert equal == {"all_gather": 1}
        assert different == {"all_gather": 5, "broadcast": 1}


def test_nothing_of_this_needs_lightning(three_compared):
    assert not any(compared.knows_lightning for compared in three_compared)


def test_some_of_the_ranks_are_compared(three_compared):
    outside, *inside = (compared.subgroup for compared in three_compared)
    assert outside == ("", [], [], "cpu")
    for found, integers, objects, device in inside:
        assert found.startswith("a, float32 [2], of rank 2 differs from rank 1: 2 elements differ, first at [0] 2 ")
        assert (integers, objects, device) == ([-(2**63) + 1, -(2**63) + 2], [10, 20], "cpu")

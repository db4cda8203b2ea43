"""Differences between tensors are measured and put into words."""

import math

import pytest
import torch

from lightning_ddp_ext.consistency.replica_differences import _compare, split_by_majority, union_of_keys


@pytest.mark.parametrize(
    ("values", "majority", "others"),
    [
        ([1, 1, 1], [0, 1, 2], []),
        ([1, 2, 1], [0, 2], [1]),
        ([2, 1, 1], [1, 2], [0]),
        ([1, 2], [0], [1]),
        ([3, 1, 1, 3], [0, 3], [1, 2]),
    ],
)
def test_the_most_frequent_value_is_the_majority_and_the_first_of_equals(values, majority, others):
    assert split_by_majority(values) == (majority, others)


def test_keys_of_all_records_are_in_the_order_of_the_first():
    assert union_of_keys([{"b": 1, "a": 2}, {"c": 1, "a": 2}]) == ["b", "a", "c"]


def compare(own, reference):
    return _compare(own.flatten(), reference.flatten(), own.shape)


def test_the_size_of_a_difference_is_that_of_its_largest_element():
    reference = torch.tensor([[1.0, 2.0], [4.0, 1000.0]])
    found = compare(reference + torch.tensor([[0.0, 0.5], [-1.0, 0.0]]), reference)
    assert (found.elements, found.index, found.values) == (2, (0, 1), ("2.5", "2"))
    assert found.absolute == 1
    assert found.relative == 1 / 4  # 1000 is equal


def test_infinities_and_nan_are_measured_as_they_are():
    zeros = torch.zeros(3)
    assert compare(torch.tensor([0.0, math.inf, 0.0]), zeros).absolute == math.inf
    assert math.isnan(compare(torch.tensor([0.0, 1.0, math.nan]), zeros).absolute)


def test_doubles_are_told_with_all_their_digits():
    found = compare(torch.tensor(math.nextafter(0.1, 1), dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64))
    assert found.values == ("0.10000000000000002", "0.10000000000000001")
    assert found.index == ()


def test_small_types_are_measured_without_overflow():
    found = compare(torch.tensor([200], dtype=torch.uint8), torch.tensor([201], dtype=torch.uint8))
    assert found.absolute == 1
    found = compare(torch.tensor([60000.0], dtype=torch.float16), -torch.tensor([60000.0], dtype=torch.float16))
    assert found.absolute == 2 * 60000


def test_equal_tensors_have_no_deviation():
    assert compare(torch.ones(2), torch.ones(2)) is None

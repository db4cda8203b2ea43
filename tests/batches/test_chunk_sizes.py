"""Rules divide batches into chunks."""

import itertools
import random

import pytest

from lightning_ddp_ext.batches.chunk_sizes import (
    avoid_single_samples,
    deal_by_cost,
    deal_by_padded_length,
    even_chunks,
    first_limited_chunks,
    proportional_chunks,
)


def transformer_xl_chunks(batch_size, num_devices, first):
    """Return the sizes of Transformer-XL's BalancedDataParallel, or None if it falls back to an even split."""
    unit = (batch_size - first) // (num_devices - 1)
    if first >= unit:
        return None
    sizes = [first] + [unit] * (num_devices - 1)
    for index in range(batch_size - sum(sizes)):
        sizes[index + 1] += 1
    return sizes


def test_first_limited_chunks_are_even_beside_the_limit_and_equal_transformer_xl():
    applied = 0
    for num_devices in (1, 2, 3, 4, 8):
        for batch_size in range(1, 70):
            for first in range(12):
                chunks = first_limited_chunks(batch_size, num_devices, first)
                assert sum(chunks) == batch_size
                assert len(chunks) == num_devices
                assert min(chunks) >= 0
                assert max(chunks[1:], default=0) - min(chunks[1:], default=0) <= 1
                if num_devices > 1:
                    assert chunks[0] == min(first, -(-batch_size // num_devices))
                    expected = transformer_xl_chunks(batch_size, num_devices, first)
                    assert expected in (None, chunks)
                    applied += expected is not None
    assert applied > 400
    assert first_limited_chunks(7, 3, first=0) == [0, 4, 3]
    assert even_chunks(11, 4) == [3, 3, 3, 2]


def test_proportional_chunks_round_by_largest_remainder():
    for batch_size, proportions, expected in (
        (8, [2, 3, 3], [2, 3, 3]), (1, [2, 3, 3], [0, 1, 0]), (8, [0, 8], [0, 8]), (4, [7, 1], [4, 0]),
        (5, [1, 1], [3, 2]), (10, [0.1, 0.2, 0.7], [1, 2, 7]),
    ):  # fmt: skip
        assert proportional_chunks(batch_size, proportions) == expected
        for total in range(1, 200):
            chunks = proportional_chunks(total, proportions)
            assert sum(chunks) == total
            for chunk, proportion in zip(chunks, proportions, strict=True):
                assert abs(chunk - total * proportion / sum(proportions)) < 1


def test_single_samples_are_avoided_within_limits():
    for chunks, limits, expected in (
        ([1, 4, 3], [], [2, 3, 3]), ([4, 1], [], [3, 2]), ([1, 1], [], [0, 2]), ([1, 1, 1], [], [0, 3, 0]),
        ([1, 0, 4], [], [2, 0, 3]), ([2, 2], [], [2, 2]), ([1, 0], [], [1, 0]), ([2, 1], [], [3, 0]),
        ([1, 31], [1], [0, 32]), ([2, 1], [2], [0, 3]), ([8, 1], [8, None], [7, 2]), ([1, 1], [1, 1], [1, 1]),
    ):  # fmt: skip
        assert avoid_single_samples(chunks, limits) == expected


def test_single_samples_are_avoided_wherever_they_can_be():
    numbers = random.Random(3)
    for _ in range(2000):
        chunks = [numbers.choice([0, 1, 1, 2, 3, 9]) for _ in range(numbers.randint(1, 5))]
        limits = [numbers.choice([None, None, size, size + 1]) for size in chunks]
        found = avoid_single_samples(chunks, limits)
        assert sum(found) == sum(chunks)
        assert all(limit is None or size <= limit for size, limit in zip(found, limits, strict=True))
        if sum(chunks) > 1 and all(limit is None for size, limit in zip(chunks, limits, strict=True) if size):
            assert 1 not in found


@pytest.mark.parametrize("deal", [deal_by_cost, deal_by_padded_length])
def test_dealt_chunks_have_all_samples_and_the_given_sizes_for_equal_costs(deal):
    numbers = random.Random(5)
    for _ in range(500):
        sizes = [numbers.choice([0, 1, 2, 5, 20]) for _ in range(numbers.randint(1, 5))] + [3]
        for cost in (0, 0.1):
            assert [len(chunk) for chunk in deal(sizes, [cost] * sum(sizes))] == sizes
        chunks = deal(sizes, [numbers.random() ** 3 for _ in range(sum(sizes))])
        assert sorted(itertools.chain(*chunks)) == list(range(sum(sizes)))
        assert [bool(chunk) for chunk in chunks] == [bool(size) for size in sizes]
        assert all(chunk == sorted(chunk) for chunk in chunks)
    assert deal([0, 0], []) == [[], []]


def test_samples_are_dealt_so_that_costs_are_in_proportion():
    for sizes, costs, expected in (
        ([2, 2], [1, 9, 1, 1], [[1], [0, 2, 3]]), ([1, 3], [3, 1, 4, 4], [[0], [1, 2, 3]]),
        ([0, 4], [5, 1, 1, 1], [[], [0, 1, 2, 3]]), ([1, 1, 1], [0, 0, 9], [[2], [0], [1]]),
    ):  # fmt: skip
        assert deal_by_cost(sizes, costs) == expected
    numbers = random.Random(5)
    for _ in range(500):
        sizes = [numbers.randint(1, 9), numbers.randint(1, 9)]
        costs = [numbers.random() ** 3 for _ in range(sum(sizes))]
        for chunk, size in zip(deal_by_cost(sizes, costs), sizes, strict=True):
            share = sum(costs) * size / sum(sizes)
            assert abs(sum(costs[position] for position in chunk) - share) <= max(costs) * max(sizes) / sum(sizes)


def test_padded_samples_are_dealt_so_that_the_largest_chunk_is_smallest():
    def largest(sizes, lengths, chunks):
        parts = [len(chunk) * max((lengths[position] for position in chunk), default=0) for chunk in chunks]
        return max(part / size for part, size in zip(parts, sizes, strict=True) if size)

    assert deal_by_padded_length([2, 2], [1, 9, 1, 1]) == [[0, 2, 3], [1]]
    numbers = random.Random(5)
    for _ in range(300):
        size = numbers.randint(1, 4)
        sizes = [size, numbers.choice([0, size]), size]
        lengths = [numbers.choice([0, 1, 2, 3, 5, 9, 30]) for _ in range(sum(sizes))]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        ends = itertools.combinations_with_replacement(range(len(order) + 1), 2)
        every = [[order[:first], order[first:second], order[second:]] for first, second in ends]
        allowed = [chunks for chunks in every if [bool(chunk) for chunk in chunks] == [bool(size) for size in sizes]]
        best = min(largest(sizes, lengths, chunks) for chunks in allowed)
        assert largest(sizes, lengths, deal_by_padded_length(sizes, lengths)) == pytest.approx(best)

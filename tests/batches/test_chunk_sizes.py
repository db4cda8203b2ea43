"""Rules divide batches into chunks."""

import itertools
import random

from lightning_ddp_ext.batches.chunk_sizes import (
    chunks_by_cost,
    even_chunks,
    first_limited_chunks,
    merge_single_samples,
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


def test_single_samples_are_merged_into_a_neighbour():
    for chunks, expected in (
        ([1, 4, 3], [0, 5, 3]), ([4, 1], [5, 0]), ([1, 1], [0, 2]), ([1, 1, 1], [0, 3, 0]), ([1, 0, 4], [0, 0, 5]),
        ([2, 2], [2, 2]), ([1, 0], [1, 0]), ([0, 1, 0, 6, 1], [0, 0, 0, 8, 0]),
    ):  # fmt: skip
        assert merge_single_samples(chunks) == expected


def test_chunks_by_cost_have_costs_in_proportion_and_the_given_sizes_for_equal_costs():
    for sizes, costs, expected in (
        ([2, 2], [100, 1, 1, 1], [1, 3]), ([2, 2], [1, 1, 1, 100], [3, 1]), ([1, 3], [3, 1, 4, 4], [1, 3]),
        ([0, 4], [5, 1, 1, 1], [0, 4]), ([4, 0], [5, 1, 1, 1], [4, 0]), ([1, 1, 1], [0, 0, 9], [1, 1, 1]),
        ([2, 1], [0, 0, 0], [2, 1]), ([0, 2, 0, 2, 0], [1, 1, 1, 9], [0, 3, 0, 1, 0]), ([2, 2], [1, 2, 0, 0], [1, 3]),
    ):  # fmt: skip
        assert chunks_by_cost(sizes, costs) == expected
    numbers = random.Random(5)
    for _ in range(500):
        sizes = [numbers.choice([0, 1, 2, 5, 20]) for _ in range(numbers.randint(1, 5))] + [3]
        assert chunks_by_cost(sizes, [0.1] * sum(sizes)) == sizes
        costs = [numbers.random() ** 3 for _ in range(sum(sizes))]
        chunks = chunks_by_cost(sizes, costs)
        assert sum(chunks) == sum(sizes)
        assert [bool(chunk) for chunk in chunks] == [bool(size) for size in sizes]
        ends = [0.0, *itertools.accumulate(costs)]
        for index in range(1, len(sizes)):
            place = ends[-1] * sum(sizes[:index]) / sum(sizes)
            error = abs(ends[sum(chunks[:index])] - place)
            is_forced = min(chunks[index - 1 : index + 1]) < 2
            assert is_forced or error <= max(costs) / 2 + 1e-12

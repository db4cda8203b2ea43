import pytest

from lightning_ddp_ext.batches.chunk_sizes import (
    even_chunks,
    first_limited_chunks,
    merge_single_samples,
    proportional_chunks,
)


def transformer_xl_chunks(batch_size, num_devices, first):
    """What BalancedDataParallel of Transformer-XL computes, or None where it falls back to an even split."""
    unit = (batch_size - first) // (num_devices - 1)
    if first >= unit:
        return None
    sizes = [first] + [unit] * (num_devices - 1)
    for index in range(batch_size - sum(sizes)):
        sizes[index + 1] += 1
    return sizes


@pytest.mark.parametrize("num_devices", [2, 3, 4, 8])
def test_first_limited_chunks_equal_those_of_transformer_xl_wherever_it_applies_its_rule(num_devices):
    applied = 0
    for batch_size in range(1, 70):
        for first in range(12):
            expected = transformer_xl_chunks(batch_size, num_devices, first)
            if expected is not None:
                applied += 1
                assert first_limited_chunks(batch_size, num_devices, first) == expected
    assert applied > 100


@pytest.mark.parametrize("num_devices", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 8, 64])
def test_chunks_cover_the_batch_and_the_first_gets_at_most_its_even_share(batch_size, num_devices):
    for first in range(10):
        chunks = first_limited_chunks(batch_size, num_devices, first)
        assert sum(chunks) == batch_size
        assert len(chunks) == num_devices
        assert min(chunks) >= 0
        assert max(chunks[1:], default=0) - min(chunks[1:], default=0) <= 1
        if num_devices > 1:
            assert chunks[0] == min(first, -(-batch_size // num_devices))


def test_zero_leaves_the_first_device_without_samples():
    assert first_limited_chunks(7, 3, first=0) == [0, 4, 3]


@pytest.mark.parametrize(
    ("batch_size", "proportions", "expected"),
    [
        (8, [2, 3, 3], [2, 3, 3]),
        (16, [2, 3, 3], [4, 6, 6]),
        (3, [2, 3, 3], [1, 1, 1]),
        (1, [2, 3, 3], [0, 1, 0]),
        (8, [0, 8], [0, 8]),
        (8, [7, 1], [7, 1]),
        (4, [7, 1], [4, 0]),
        (5, [1, 1], [3, 2]),
        (10, [0.1, 0.2, 0.7], [1, 2, 7]),
    ],
)
def test_proportional_chunks_round_by_largest_remainder(batch_size, proportions, expected):
    assert proportional_chunks(batch_size, proportions) == expected


def test_proportional_chunks_stay_within_one_sample_of_the_exact_share():
    for batch_size in range(1, 200):
        chunks = proportional_chunks(batch_size, [3, 1, 2.5])
        assert sum(chunks) == batch_size
        for chunk, proportion in zip(chunks, [3, 1, 2.5], strict=True):
            assert abs(chunk - batch_size * proportion / 6.5) < 1


def test_even_chunks_give_remainders_to_the_lowest_index():
    assert even_chunks(11, 4) == [3, 3, 3, 2]


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([1, 4, 3], [0, 5, 3]),
        ([4, 1], [5, 0]),
        ([1, 1], [0, 2]),
        ([1, 1, 1], [0, 3, 0]),
        ([1, 0, 4], [0, 0, 5]),
        ([2, 2], [2, 2]),
        ([1, 0], [1, 0]),
        ([0, 1, 0, 6, 1], [0, 0, 0, 8, 0]),
    ],
)
def test_single_samples_are_merged_into_a_neighbour(chunks, expected):
    assert merge_single_samples(chunks) == expected

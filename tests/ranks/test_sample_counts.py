"""The number of samples in a batch: drawn by a loader, or the size of its tensors."""

import math
import warnings

import pytest
import torch

from lightning_ddp_ext.ranks.sample_counts import BatchSamples


def test_without_a_count_of_the_loader_the_tensors_decide():
    batch = torch.zeros(5, 3)
    assert BatchSamples(0).count(batch) == 5
    assert BatchSamples(1).rounded(batch) == 3
    unclear = BatchSamples(0)
    assert unclear.count({"a": torch.zeros(3), "b": torch.zeros(4)}) is unclear.rounded([batch, torch.zeros(2)]) is None
    assert "ambiguous" in unclear.problem
    assert math.isnan(unclear.weight([batch, torch.zeros(2)]))


PAIR = torch.zeros(3, 5), torch.zeros(3)


@pytest.mark.parametrize(
    ("batch", "batch_dim", "drawn", "expected"),
    [
        (PAIR, 0, 4.0, 3.0),
        ({"a": torch.zeros(2, 3, 5), "b": torch.zeros(1, 3)}, 1, 4.0, 3.0),
        (torch.zeros(3, 5), 0, 4.0, 3.0),
        ((torch.zeros(0, 5), torch.zeros(0)), 0, 4.0, 0.0),
        ([torch.zeros(3, 5), ["a", "b", "c"]], 0, 4.0, 3.0),
        (PAIR, 0, 3.0, 3.0),
        (PAIR, 0, 2.0, 2.0),  # several rows for a sample
        ((torch.zeros(3, 4, 5), torch.zeros(3, 4)), 0, 4.0, 4.0),  # three points in time
        ((torch.zeros(3, 5), torch.zeros(2)), 0, 4.0, 4.0),  # no common size
        (PAIR, 0, None, 3.0),
    ],
)
def test_a_batch_that_is_smaller_than_drawn_decides_unless_samples_may_be_in_another_dimension(
    batch, batch_dim, drawn, expected
):
    counted = BatchSamples(batch_dim)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            counted.begin(drawn, batch)
    assert counted.count(batch) == expected
    dropped = drawn is not None and expected < drawn
    assert [f"drawn 4 samples for a batch of {expected:g} samples" in str(one.message) for one in caught] == [
        True
    ] * dropped
    counted.begin(None)
    assert counted.count(torch.zeros(7)) == 7.0 or batch_dim

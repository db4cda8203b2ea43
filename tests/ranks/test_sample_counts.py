"""Numbers of samples of batches that several loaders contribute to."""

import math

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_ddp_ext.ranks.sample_counts import (
    BatchSamples,
    CountedCombinedLoader,
    combine_counted,
    mean_count,
)
from lightning_ddp_ext.resume.resumable_loader import POSITION, WORLD_SIZE, ResumableCombinedLoader
from lightning_ddp_ext.resume.resumable_rng import ResumableRng


def loader(samples, batch_size):
    return DataLoader(torch.arange(samples), batch_size)


def counts_of(combined):
    found = []
    for _ in combined:
        found.append(combined.samples.popleft())
    assert not combined.samples
    return found


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("max_size_cycle", [3.0, 2.5, 3.0, 1.5]),  # the second loader begins again
        ("max_size", [3.0, 2.5, 4.0, 2.0]),  # the second loader has ended
        ("min_size", [3.0, 2.5]),
        ("sequential", [4.0, 4.0, 4.0, 2.0, 2.0, 1.0]),
    ],
)
def test_loaders_that_contribute_are_averaged_in_every_mode(mode, expected):
    combined = CountedCombinedLoader({"a": loader(14, 4), "b": loader(3, 2)}, mode)
    theirs = CombinedLoader({"a": loader(14, 4), "b": loader(3, 2)}, mode)
    assert [counts_of(combined), counts_of(combined)] == [expected, expected]
    assert [str(fetched) for fetched in combined] == [str(fetched) for fetched in theirs]
    assert len(combined) == len(theirs) == len(expected)


def test_limits_and_lengths_are_those_of_lightning():
    combined = CountedCombinedLoader([loader(14, 4)], "sequential")
    with pytest.raises(RuntimeError, match="call `iter"):
        len(combined)
    combined.limits = 2
    iter(combined)
    assert len(combined) == len(counts_of(combined)) == 2


def test_a_batch_that_one_loader_does_not_count_is_not_counted():
    assert mean_count([4, None]) is None
    assert mean_count([]) is None
    combined = CountedCombinedLoader([loader(4, 2), [torch.zeros(3)] * 2], "min_size")
    assert counts_of(combined) == [None, None]


def test_batches_that_are_passed_over_leave_no_number():
    combined = ResumableCombinedLoader(
        DataLoader(range(6), batch_sampler=[[0, 1], [2], [3, 4, 5]]), "max_size_cycle", ResumableRng(), 1
    )
    combined._load_state_dicts([{POSITION: 1, WORLD_SIZE: 1}])
    assert counts_of(combined) == [1.0, 3.0]


def test_numbers_that_nobody_takes_do_not_add_up():
    combined = CountedCombinedLoader(loader(8, 2), "max_size_cycle")
    assert len(list(combined)) == 4
    assert list(combined.samples) == [2.0, 2.0]


def test_a_class_of_the_users_own_stays():
    class Own(CombinedLoader):
        pass

    given = Own([loader(4, 2)], "sequential")
    assert combine_counted(given, is_training=False) is given
    assert isinstance(combine_counted(CombinedLoader([loader(4, 2)], "min_size"), True), CountedCombinedLoader)


def test_tensors_decide_along_the_given_dimension_where_nothing_was_drawn():
    batch = torch.zeros(5, 3)
    assert BatchSamples(0).count(batch) == 5
    assert BatchSamples(1).rounded(batch) == 3
    unclear = BatchSamples(0)
    assert unclear.count({"a": torch.zeros(3), "b": torch.zeros(4)}) is unclear.rounded([batch, torch.zeros(2)]) is None
    assert "ambiguous" in unclear.problem
    assert math.isnan(unclear.weight([batch, torch.zeros(2)]))

"""The number of samples in a batch: drawn by one loader or several, or the size of its tensors."""

import math
import warnings
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ddp_ext.batches.sample_counts import BatchSamples, mean_count
from lightning_ddp_ext.ranks.loaders import CountedCombinedLoader, CountedLoader, combine_counted
from lightning_ddp_ext.resume.resumable_loader import POSITION, WORLD_SIZE, ResumableCombinedLoader, ResumableRng


class Numbers(Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return torch.full((3,), float(index))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Numbers()[index] for index in range(7))


class Broken(Numbers):
    def __getitem__(self, index):
        return None if index % 3 == 0 else super().__getitem__(index)


class Table(Numbers):
    def __getitems__(self, indices):
        return {"a": torch.tensor(indices), "b": torch.tensor(indices)}


class Columns(Numbers):
    def __getitems__(self, indices):
        return torch.tensor(indices), torch.tensor(indices)


class OwnIteration(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            assert isinstance(batch, torch.Tensor)
            yield batch


class OwnIterator(DataLoader):
    def _get_iterator(self):
        return map(torch.Tensor.clone, super()._get_iterator())


across_time = partial(torch.stack, dim=1)


def only_in_double(samples):
    (sample,) = samples
    return sample[0].double(), {"labels": sample[1].double()}


READY = [(torch.zeros(size, 5), torch.zeros(size)) for size in (4, 2)]
SIZES = [[0, 1, 2, 3], [4], [5, 6]]

CASES = {
    "another dimension": (lambda: DataLoader(Numbers(), 3, collate_fn=across_time), [3, 3, 1]),
    "without the last": (lambda: DataLoader(Numbers(), 3, drop_last=True), [3, 3]),
    "a batch sampler": (lambda: DataLoader(Numbers(), batch_sampler=SIZES, collate_fn=across_time), [4, 1, 2]),
    "a stream": (lambda: DataLoader(Stream(), 3, collate_fn=across_time), [3, 3, 1]),
    "broken samples": (
        lambda: DataLoader(Broken(), 4, collate_fn=lambda parts: torch.stack([*filter(torch.is_tensor, parts)])),
        [2, 2],
    ),
    "workers": (lambda: DataLoader(Numbers(), batch_sampler=SIZES, num_workers=2, collate_fn=across_time), [4, 1, 2]),
    "workers that persist": (
        lambda: DataLoader(Numbers(), batch_sampler=SIZES, num_workers=2, persistent_workers=True), [4, 1, 2],
    ),
    "one batch each": (
        lambda: DataLoader([torch.zeros(2), torch.zeros(5)], 1, collate_fn=lambda samples: samples[0]), [None, None],
    ),
    "batches that are converted": (lambda: DataLoader(READY, 1, collate_fn=only_in_double), [None, None]),
    "batches that are converted in workers": (
        lambda: DataLoader(READY, sampler=[1, 0], num_workers=1, collate_fn=only_in_double), [None, None],
    ),
    "batches that get a dimension": (lambda: DataLoader(READY, 1), [1, 1]),
    "single samples in lists": (
        lambda: DataLoader([torch.zeros(3, 5)] * 2, 1, collate_fn=lambda samples: {"images": list(samples)}), [1, 1],
    ),
    "single samples without tensors": (
        lambda: DataLoader([3, 4], 1, collate_fn=lambda samples: {"length": len(samples)}), [1, 1],
    ),
    "a last sample by itself": (lambda: DataLoader([torch.zeros(3, 5)] * 3, 2, collate_fn=torch.cat), [2, 1]),
    "no batches": (lambda: DataLoader([torch.zeros(2), torch.zeros(5)], batch_size=None), [None, None]),
    "nothing but holes": (lambda: DataLoader([None] * 4, 2, collate_fn=len), [None, None]),
    "columns": (lambda: DataLoader(Table(), 4, collate_fn=lambda samples: samples), [None, None]),
    "a tuple of columns": (lambda: DataLoader(Columns(), 4, collate_fn=lambda samples: samples), [None, None]),
    "an iteration of its own": (lambda: OwnIteration(Numbers(), 3), [None, None, None]),
    "an iterator of its own": (lambda: OwnIterator(Numbers(), 3), [None, None, None]),
    "no loader": (lambda: [torch.zeros(2), torch.zeros(5)], [None, None]),
}  # fmt: skip


def test_samples_are_counted_as_they_are_drawn():
    for name, (make, expected) in CASES.items():
        loader, counts = make(), []
        collate = getattr(loader, "collate_fn", None)
        counted = CountedLoader(loader, counts)
        plain = list(make())
        for _ in range(2):
            counts.clear()
            batches = list(counted)
            assert counts == expected, name
            torch.testing.assert_close(batches, plain)
        assert sized_len(counted) == sized_len(loader), name
        # The user's loader is unchanged: its collate function and its batches, also with persistent workers.
        torch.testing.assert_close(list(loader), plain)
        assert getattr(loader, "collate_fn", None) is collate, name


def test_workers_give_the_count_of_each_batch_in_any_order_unless_they_began_before():
    options = {"num_workers": 2, "in_order": False, "persistent_workers": True, "collate_fn": torch.stack}
    counts, loader = [], DataLoader(Numbers(), batch_sampler=SIZES, **options)
    for _ in range(3):
        for batch in CountedLoader(loader, counts):
            assert counts.pop() == len(batch)
    loader = DataLoader(Numbers(), 3, num_workers=1, persistent_workers=True)
    assert len(next(iter(loader))) == 3
    assert [len(batch) for batch in CountedLoader(loader, counts)] == [3, 3, 1]
    assert counts == [None] * 3


def loader(samples, batch_size):
    return DataLoader(torch.arange(samples), batch_size)


def counts_of(combined):
    found = []
    for _ in combined:
        found.append(combined.fetched.popleft().samples)
    assert not combined.fetched
    return found


@pytest.mark.parametrize(
    ("mode", "limits", "expected"),
    [
        ("max_size_cycle", None, [3.0, 2.5, 3.0, 1.5]),  # the second loader begins again
        ("max_size", None, [3.0, 2.5, 4.0, 2.0]),  # the second loader has ended
        ("min_size", None, [3.0, 2.5]),
        ("sequential", None, [4.0, 4.0, 4.0, 2.0, 2.0, 1.0]),
        ("sequential", [2, 1], [4.0, 4.0, 2.0]),
    ],
)
def test_loaders_that_contribute_are_averaged_in_every_mode(mode, limits, expected):
    combined, theirs = (
        kind({"a": loader(14, 4), "b": loader(3, 2)}, mode) for kind in (CountedCombinedLoader, CombinedLoader)
    )
    combined.limits = theirs.limits = limits
    assert [counts_of(combined), counts_of(combined)] == [expected, expected]
    assert [str(fetched) for fetched in combined] == [str(fetched) for fetched in theirs]
    assert len(combined) == len(theirs) == len(expected)


def test_counts_are_none_if_a_loader_does_not_count_and_bounded_if_a_step_does_not_take_them():
    combined = CountedCombinedLoader([loader(4, 2), [torch.zeros(3)] * 2], "min_size")
    assert counts_of(combined) == [None, None]
    combined = CountedCombinedLoader(loader(8, 2), "max_size_cycle")
    assert len(list(combined)) == 4
    assert [fetched.samples for fetched in combined.fetched] == [2.0, 2.0]


def test_batches_that_a_resumed_run_skips_leave_no_number():
    combined = ResumableCombinedLoader(
        DataLoader(range(6), batch_sampler=[[0, 1], [2], [3, 4, 5]]), "max_size_cycle", ResumableRng(), 1
    )
    combined._load_state_dicts([{POSITION: 1, WORLD_SIZE: 1}])
    assert counts_of(combined) == [1.0, 3.0]


def test_a_users_subclass_stays():
    class Own(CombinedLoader):
        pass

    given = Own([loader(4, 2)], "sequential")
    assert combine_counted(given, is_training=False) is given
    assert isinstance(combine_counted(CombinedLoader([loader(4, 2)], "min_size"), True), CountedCombinedLoader)


def test_without_a_count_of_the_loader_the_tensors_decide():
    batch = torch.zeros(5, 3)
    assert BatchSamples(0).count(batch) == 5
    assert BatchSamples(1).rounded(batch) == 3
    unclear = BatchSamples(0)
    assert unclear.count({"a": torch.zeros(3), "b": torch.zeros(4)}) is unclear.rounded([batch, torch.zeros(2)]) is None
    assert "ambiguous" in unclear.problem
    assert math.isnan(unclear.weight([batch, torch.zeros(2)]))


class Graphs:
    """A batch of graphs, of a class that the package does not know."""

    def __init__(self, number):
        self.num_graphs = number


def stack(rows):
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def pad(rows):
    return torch.nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True)


EIGHT = [(torch.randn(5), torch.tensor(index)) for index in range(8)]
SQUARE = [(torch.randn(8), torch.tensor(index)) for index in range(8)]  # as many features as samples
RAGGED = [(torch.randn(3 + index, 2), torch.tensor(index)) for index in range(8)]
IMAGES = [(torch.randn(3, 9, 7 + index), {"boxes": torch.zeros(index, 4)}) for index in range(8)]
TIMES = [(torch.randn(3, 5), torch.randn(3)) for _ in range(8)]  # three points in time
# Samples, and a collate function, which is called with all samples and with six of them.
COLLATED = {
    "stacked": (EIGHT, stack),
    "beside a constant": (EIGHT, lambda rows: {"x": stack(rows)[0], "y": stack(rows)[1], "scale": torch.ones(1)}),
    "beside the indices of all": (EIGHT, lambda rows: {"x": stack(rows)[0], "index": torch.arange(8)}),
    "as many features as drawn": (SQUARE, stack),
    "in another dimension": (EIGHT, lambda rows: stack(rows)[0].T.contiguous()),
    "a list of samples": (EIGHT, list),
    "a list of samples with as many features as drawn": (SQUARE, list),
    "a tuple of mappings": ([{"x": x, "y": y} for x, y in EIGHT], tuple),
    "tensors of different lengths": (RAGGED, lambda rows: [x for x, _ in rows]),
    "images of one channel count": (IMAGES, lambda rows: [x for x, _ in rows]),
    "images and targets": (IMAGES, lambda rows: tuple(zip(*rows, strict=True))),
    "images and converted targets": (IMAGES, lambda rows: ([x for x, _ in rows], [y["boxes"] + 1 for _, y in rows])),
    "padded": (RAGGED, pad),
    "time first": (TIMES, lambda rows: [torch.stack([row[column] for row in rows], 1) for column in (0, 1)]),
    "time first, with positions": (TIMES, lambda rows: (torch.stack([x for x, _ in rows], 1), torch.arange(3))),
    "time first, with a mask": (TIMES, lambda rows: {"x": torch.stack([x for x, _ in rows], 1), "m": torch.ones(3, 3)}),
    "graphs": ([(torch.zeros(4, 2),)] * 8, lambda rows: Graphs(len(rows))),
    "graphs with labels of all": ([(torch.zeros(4, 2),)] * 8, lambda rows: (Graphs(len(rows)), torch.zeros(8))),
    "texts": ([("a", 0)] * 8, list),
}


@pytest.mark.parametrize(("samples", "collate"), COLLATED.values(), ids=COLLATED)
def test_the_weight_is_the_number_of_samples_that_the_collate_function_keeps(samples, collate):
    for kept in (8, 6):
        counts, counted = [], BatchSamples(0)
        (batch,) = CountedLoader(
            DataLoader(samples, 8, collate_fn=lambda rows, kept=kept: collate(rows[-kept:])), counts
        )
        assert counts == [8]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            counted.begin(mean_count(counts), batch)
        assert counted.count(batch) == kept
        assert ["drawn 8 samples for a batch of 6 samples" in str(one.message) for one in caught] == [True] * (
            8 - kept > 0
        )


# A collate function with rows that are no samples; the drawn number stays.
SILENT = {
    "two views": lambda rows: [stack(rows + rows)[0]] * 2,
    "two views in mappings": lambda rows: [{"x": stack(rows + rows)[0]}] * 2,
    "two views in a list": lambda rows: [x for x, _ in rows + rows],
    "flat": lambda rows: {"x": torch.zeros(50, 3), "of": torch.zeros(50), "edges": torch.zeros(2, 200)},
    "prototypes": lambda rows: [*stack(rows), torch.zeros(6, 5)],
    "converted": lambda rows: [x.double() for x, _ in rows],
    "a constant": lambda rows: [*stack(rows), torch.zeros(2)],
    "nested": lambda rows: torch.nested.nested_tensor([x for x, _ in rows], layout=torch.jagged),
}


@pytest.mark.parametrize("collate", SILENT.values(), ids=SILENT)
def test_batches_of_other_rows_than_samples_keep_the_drawn_number_without_a_warning(collate):
    counts, counted = [], BatchSamples(0)
    (batch,) = CountedLoader(DataLoader(EIGHT, 8, collate_fn=collate), counts)
    counted.begin(mean_count(counts), batch)
    assert counted.count(batch) == 8


def test_numbers_of_samples_reach_the_batch_from_workers():
    counts, combined = [], DataLoader(EIGHT, 4, num_workers=1, collate_fn=lambda rows: rows[1:])
    assert [len(batch) for batch in CountedLoader(combined, counts)] == [3, 3]
    assert [(count, count.held) for count in counts] == [(4, 3)] * 2


PAIR = torch.zeros(3, 5), torch.zeros(3)
UNCLEAR = "of an unknown number of samples"


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
        ((torch.zeros(3, 4, 5), torch.zeros(4)), 0, 4.0, 4.0),
        ((torch.zeros(3, 4, 5), torch.zeros(3)), 0, 4.0, 4.0),  # and positions, or a mask
        ((torch.zeros(3, 4, 5), torch.zeros(3, 3)), 0, 4.0, 4.0),
        ((torch.zeros(3, 4, 5), torch.zeros(3, 3)), 1, 4.0, 4.0),
        ((torch.zeros(3, 5), torch.zeros(3, 4)), 0, 4.0, 3.0),
        ([torch.zeros(3, 5)] * 4, 0, 4.0, 4.0),  # a list of samples
        ([torch.zeros(3, 5), torch.zeros(2, 5), torch.zeros(7, 5)], 0, 4.0, 4.0),
        ((torch.zeros(4, 5), torch.zeros(2)), 0, 4.0, 4.0),  # a constant
        (PAIR, 0, None, 3.0),
        # Samples of other shapes.
        ((torch.zeros(3, 5), torch.zeros(2)), 0, 4.0, UNCLEAR),
        ((torch.zeros(3, 5), torch.zeros(4)), 0, 4.0, UNCLEAR),
    ],
)
def test_a_batch_that_is_smaller_than_drawn_decides_unless_samples_may_be_in_another_dimension(
    batch, batch_dim, drawn, expected
):
    """For batches that tell no more, such as those of texts."""
    counted = BatchSamples(batch_dim)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            counted.begin(drawn, batch)
    found = UNCLEAR if expected == UNCLEAR else f"of {expected:g} samples"
    assert counted.count(batch) == (drawn if expected == UNCLEAR else expected)
    is_warned = expected == UNCLEAR or (drawn is not None and expected < drawn)
    assert [f"drawn 4 samples for a batch {found}" in str(one.message) for one in caught] == [True] * is_warned
    counted.begin(None)
    assert counted.count(torch.zeros(7)) == 7.0 or batch_dim

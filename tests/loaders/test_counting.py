"""The number of samples in a batch that one loader or several have drawn."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ddp_ext.loaders.counting import CountedLoader
from lightning_ddp_ext.loaders.step_loader import (
    POSITION,
    WORLD_SIZE,
    EvenSource,
    StepLoader,
    combine_evenly,
)
from lightning_ddp_ext.resume.rng_state import ResumableRng


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
    loaders = {"a": loader(14, 4), "b": loader(3, 2)}
    combined, theirs = StepLoader(loaders, mode, EvenSource()), CombinedLoader(loaders, mode)
    combined.limits = theirs.limits = limits
    assert [counts_of(combined), counts_of(combined)] == [expected, expected]
    assert [str(fetched) for fetched in combined] == [str(fetched) for fetched in theirs]
    assert len(combined) == len(theirs) == len(expected)


def test_counts_are_none_if_a_loader_does_not_count_and_bounded_if_a_step_does_not_take_them():
    combined = StepLoader([loader(4, 2), [torch.zeros(3)] * 2], "min_size", EvenSource())
    assert counts_of(combined) == [None, None]
    combined = StepLoader(loader(8, 2), "max_size_cycle", EvenSource())
    assert len(list(combined)) == 4
    assert [fetched.samples for fetched in combined.fetched] == [2.0, 2.0]


def test_batches_that_a_resumed_run_skips_leave_no_number():
    loader = DataLoader(range(6), batch_sampler=[[0, 1], [2], [3, 4, 5]])
    combined = StepLoader(loader, "max_size_cycle", EvenSource(), ResumableRng())
    combined._load_state_dicts([{POSITION: 1, WORLD_SIZE: 1}])
    assert counts_of(combined) == [1.0, 3.0]


def test_a_users_subclass_stays():
    class Own(CombinedLoader):
        pass

    given = Own([loader(4, 2)], "sequential")
    assert combine_evenly(given, is_training=False) is given
    assert isinstance(combine_evenly(CombinedLoader([loader(4, 2)], "min_size"), True), StepLoader)

"""The number of samples of a batch is known from the loader that draws them, whatever the batch looks like."""

import pytest
import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ddp_ext.ranks.sample_counts import CountedLoader


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


def across_time(samples):
    """Batches of shape (time, batch)."""
    return torch.stack(samples, dim=1)


def without_broken(samples):
    return torch.stack([sample for sample in samples if sample is not None])


def first(samples):
    return samples[0]


def same(samples):
    return samples


def only_in_double(samples):
    (sample,) = samples
    return sample[0].double(), {"labels": sample[1].double()}


def concatenated(samples):
    return torch.cat(samples)


def listed(samples):
    return {"images": list(samples)}


def length(samples):
    return {"length": len(samples)}


READY = [(torch.zeros(size, 5), torch.zeros(size)) for size in (4, 2)]
SIZES = [[0, 1, 2, 3], [4], [5, 6]]

CASES = {
    "another dimension": (lambda: DataLoader(Numbers(), 3, collate_fn=across_time), [3, 3, 1]),
    "without the last": (lambda: DataLoader(Numbers(), 3, drop_last=True), [3, 3]),
    "a batch sampler": (lambda: DataLoader(Numbers(), batch_sampler=SIZES, collate_fn=across_time), [4, 1, 2]),
    "a stream": (lambda: DataLoader(Stream(), 3, collate_fn=across_time), [3, 3, 1]),
    "broken samples": (lambda: DataLoader(Broken(), 4, collate_fn=without_broken), [2, 2]),
    "workers": (lambda: DataLoader(Numbers(), batch_sampler=SIZES, num_workers=2, collate_fn=across_time), [4, 1, 2]),
    "workers that persist": (
        lambda: DataLoader(Numbers(), batch_sampler=SIZES, num_workers=2, persistent_workers=True), [4, 1, 2],
    ),
    "one batch each": (lambda: DataLoader([torch.zeros(2), torch.zeros(5)], 1, collate_fn=first), [None, None]),
    "batches that are converted": (lambda: DataLoader(READY, 1, collate_fn=only_in_double), [None, None]),
    "batches that are converted in workers": (
        lambda: DataLoader(READY, sampler=[1, 0], num_workers=1, collate_fn=only_in_double), [None, None],
    ),
    "batches that get a dimension": (lambda: DataLoader(READY, 1), [1, 1]),
    "single samples in lists": (lambda: DataLoader([torch.zeros(3, 5)] * 2, 1, collate_fn=listed), [1, 1]),
    "single samples without tensors": (lambda: DataLoader([3, 4], 1, collate_fn=length), [1, 1]),
    "a last sample by itself": (lambda: DataLoader([torch.zeros(3, 5)] * 3, 2, collate_fn=concatenated), [2, 1]),
    "no batches": (lambda: DataLoader([torch.zeros(2), torch.zeros(5)], batch_size=None), [None, None]),
    "nothing but holes": (lambda: DataLoader([None] * 4, 2, collate_fn=len), [None, None]),
    "columns": (lambda: DataLoader(Table(), 4, collate_fn=same), [None, None]),
    "a tuple of columns": (lambda: DataLoader(Columns(), 4, collate_fn=same), [None, None]),
    "an iteration of its own": (lambda: OwnIteration(Numbers(), 3), [None, None, None]),
    "an iterator of its own": (lambda: OwnIterator(Numbers(), 3), [None, None, None]),
    "no loader": (lambda: [torch.zeros(2), torch.zeros(5)], [None, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_samples_are_counted_as_they_are_drawn(name):
    make, expected = CASES[name]
    loader = make()
    counts = []
    counted = CountedLoader(loader, counts)
    plain = list(make())
    for _ in range(2):
        counts.clear()
        batches = list(counted)
        assert counts == expected
        torch.testing.assert_close(batches, plain)
    assert sized_len(counted) == sized_len(loader)
    # Whoever has the loader finds nothing changed: neither its function nor its batches, also of workers that persist.
    torch.testing.assert_close(list(loader), plain)
    assert getattr(loader, "collate_fn", None) is getattr(make(), "collate_fn", None)


def test_batches_in_any_order_have_their_own_number():
    loader = DataLoader(
        Numbers(), batch_sampler=SIZES, num_workers=2, in_order=False, collate_fn=torch.stack, persistent_workers=True
    )
    counts = []
    for _ in range(3):
        for batch in CountedLoader(loader, counts):
            assert counts.pop() == len(batch)


def test_workers_from_before_are_not_counted():
    loader = DataLoader(Numbers(), 3, num_workers=1, persistent_workers=True)
    assert len(next(iter(loader))) == 3
    counts = []
    assert [len(batch) for batch in CountedLoader(loader, counts)] == [3, 3, 1]
    assert counts == [None] * 3

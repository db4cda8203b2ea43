"""Batches of every kind and size are cut, in every step they come to."""

from collections import namedtuple

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext import BalancedDataParallelStrategy, BatchSplitError
from tests.parity import FEATURES, Classifier, balanced, dataset, relative_difference, seeded, train

Batch = namedtuple("Batch", ["features", "labels"])


# Lightning cannot count the samples of the tuple on a single device.
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda x, y: {"in": {"x": x}, "y": [y]}, lambda b: (b["in"]["x"], b["y"][0])),
        (lambda x, y: ([x], (y, torch.tensor(2.0))), lambda b: (b[0][0], b[1][0])),
        (lambda x, y: Batch(x, y), lambda b: (b.features, b.labels)),
        (lambda x, y: torch.cat([x, y[:, None].to(x)], dim=1), lambda b: (b[:, :FEATURES], b[:, FEATURES].long())),
    ],
    ids=["dict", "tuple", "namedtuple", "tensor"],
)
def test_nested_batches_are_cut(pack, unpack):
    class Unpacking(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(unpack(batch), batch_idx)

    def collate(samples):
        features, labels = zip(*samples, strict=True)
        return pack(torch.stack(features), torch.stack(labels))

    def loader():
        return DataLoader(dataset(27), batch_size=8, collate_fn=collate)

    single = train(seeded(Unpacking), loader=loader())
    parallel = train(seeded(Unpacking), balanced([2, 3, 3]), 3, loader=loader())
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


class Pairs:
    """A batch that only the module knows how to cut."""

    def __init__(self, samples):
        self.features, self.labels = (torch.stack(column) for column in zip(*samples, strict=True))


class Scattering(Classifier):
    def scatter_batch(self, batch, split):
        sizes = split(len(batch.labels))
        columns = zip(batch.features.split(sizes), batch.labels.split(sizes), sizes, strict=True)
        return [(features, labels) if size else None for features, labels, size in columns]

    def training_step(self, batch, batch_idx):
        if isinstance(batch, Pairs):
            batch = (batch.features, batch.labels)
        self.log_dict({}, batch_size=len(batch[1]))
        return functional.cross_entropy(self.network(batch[0]), batch[1])


def test_a_module_may_cut_its_batches_itself():
    def loader():
        return DataLoader(dataset(27), batch_size=8, collate_fn=Pairs)

    single = train(seeded(Scattering), loader=loader())
    for options in ({"split": [2, 6]}, {"gpu0_batch_size": 0}):
        parallel = train(seeded(Scattering), balanced(**options), 2, loader=loader())
        assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


def test_chunks_of_another_number_than_the_devices_are_refused():
    class Wrong(Scattering):
        def scatter_batch(self, batch, split):
            return super().scatter_batch(batch, split)[:1]

    with pytest.raises(BatchSplitError, match=r"`scatter_batch` returned 1 chunks for the sizes \[4, 4\]"):
        train(Wrong(), balanced(), 2, loader=DataLoader(dataset(8), batch_size=8, collate_fn=Pairs))


class RandomSizes(Dataset):
    """Batches of every size from 1 to 9, one item each."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return dataset(9 - index)[:]


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_batches_smaller_than_the_number_of_devices_work(devices):
    def loader():
        return DataLoader(RandomSizes(), batch_size=None)

    single = train(seeded(Classifier), loader=loader(), max_epochs=1)
    for options in ({}, {"gpu0_batch_size": 1}, {"split": list(range(devices))}):
        parallel = train(
            seeded(Classifier), BalancedDataParallelStrategy(**options), devices, loader=loader(), max_epochs=1
        )
        assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


def test_a_batch_that_comes_again_is_cut_again():
    class Augmented(Classifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] * (1 + self.trainer.global_step), batch[1]

    class SameBatch:
        batch = dataset(8, torch.float32)[:]

        def __iter__(self):
            return iter([self.batch] * 4)

    options = {"precision": "32-true", "max_epochs": 1, "loader": SameBatch()}
    single = train(seeded(Augmented), **options)
    parallel = train(seeded(Augmented), balanced([2, 6]), 2, **options)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-5

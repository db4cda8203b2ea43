"""Training on batches of every kind and size, from one loader or several, equals one device."""

from collections import namedtuple

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ddp_ext import BatchSplitError
from tests.parity import (
    FEATURES,
    Classifier,
    Evaluated,
    assert_same_training,
    balanced,
    batches,
    both_ways,
    compare,
    dataset,
    relative_difference,
    seeded,
    train,
)

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

    compare(Unpacking, {"loader": batches(collate_fn=collate)})


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
            batch = (batch.features.to(self.device), batch.labels.to(self.device))
        self.log_dict({}, batch_size=len(batch[1]))
        return functional.cross_entropy(self.network(batch[0]), batch[1])


@pytest.mark.parametrize("options", [{"split": [2, 6]}, {"gpu0_batch_size": 0}])
def test_a_module_may_cut_its_batches_itself(options):
    compare(Scattering, {"loader": batches(collate_fn=Pairs)}, **options)


def test_chunks_of_another_number_than_the_devices_are_refused():
    class Wrong(Scattering):
        def scatter_batch(self, batch, split):
            return super().scatter_batch(batch, split)[:1]

    with pytest.raises(BatchSplitError, match=r"`scatter_batch` returned 1 chunks for the sizes \[4, 4\]"):
        train(Wrong(), balanced(), 2, loader=batches(8, collate_fn=Pairs))


class RandomSizes(Dataset):
    """Batches of every size from 1 to 9, one item each."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return dataset(9 - index)[:]


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_batches_smaller_than_the_number_of_devices_work(devices):
    options = {"loader": DataLoader(RandomSizes(), batch_size=None), "max_epochs": 1}
    single = train(seeded(Classifier), **options)
    for arguments in ({}, {"gpu0_batch_size": 1}, {"split": list(range(devices))}):
        assert_same_training(train(seeded(Classifier), balanced(**arguments), devices, **options), single)


def test_a_batch_that_comes_again_is_cut_again():
    class Augmented(Classifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] * (1 + self.trainer.global_step), batch[1]

    class SameBatch:
        batch = dataset(8, torch.float32)[:]

        def __iter__(self):
            return iter([self.batch] * 4)

    def run(**way):
        return train(seeded(Augmented), **way, precision="32-true", max_epochs=1, loader=SameBatch())

    single, parallel = both_ways(run)
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-5


class TwoSources(Classifier):
    """Takes a dictionary or a list of batches, of which some may have run out."""

    def training_step(self, batch, batch_idx):
        parts = [part for part in (batch.values() if isinstance(batch, dict) else batch) if part is not None]
        loss = sum(functional.cross_entropy(self.network(features), labels) for features, labels in parts)
        self.log("loss", loss, on_epoch=True, batch_size=len(parts[0][1]))
        return loss


@pytest.mark.parametrize(
    ("mode", "kind"), [("min_size", dict), ("max_size_cycle", dict), ("max_size", dict), ("max_size", list)]
)
def test_loaders_that_are_read_at_once(mode, kind):
    def options():
        loaders = {"a": batches(40), "b": batches(24)}
        return {"loader": CombinedLoader(loaders if kind is dict else list(loaders.values()), mode)}

    single, _ = compare(TwoSources, options)
    assert single.trainer.global_step == 3 * (3 if mode == "min_size" else 5)


def test_several_loaders_of_validation_test_and_prediction():
    def run(**way):
        trained = train(seeded(Evaluated), **way, val_loader=[batches(19), batches(9, 3)])
        loaders = {"a": batches(19), "b": batches(9, 3)}
        tested = trained.trainer.test(trained.module, loaders, verbose=False)
        return trained, tested, trained.trainer.predict(trained.module, list(loaders.values()))

    (single, expected, predicted), (parallel, found, predictions) = both_ways(run)
    assert_same_training(parallel, single)
    assert "val_loss/dataloader_idx_1" in expected[1]
    assert found == [pytest.approx(result, rel=1e-9) for result in expected]
    torch.testing.assert_close(predictions, predicted)


def test_validation_loaders_that_are_read_at_once():
    class BothAtOnce(Evaluated):
        def validation_step(self, batch, batch_idx):
            for name, part in batch.items():
                if part is not None:
                    loss = functional.cross_entropy(self.network(part[0]), part[1])
                    self.log(f"val_{name}", loss, batch_size=len(part[1]))

    compare(BothAtOnce, lambda: {"val_loader": CombinedLoader({"a": batches(16), "b": batches(24)}, "max_size")})


def test_combined_loaders_with_different_sizes_are_refused_by_name():
    loader = CombinedLoader({"a": batches(8), "b": batches(4, 4)}, "min_size")
    with pytest.raises(BatchSplitError, match=r"ambiguous: `batch\['a'\]` has 8, `batch\['b'\]` has 4"):
        train(Classifier(), balanced(), 2, loader=loader)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(dataset(27))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: batches(num_workers=2, persistent_workers=True), {}),
        (lambda: DataLoader(Stream(), batch_size=8), {"max_steps": 6, "max_epochs": -1}),
        (lambda: batches(shuffle=True), {}),
    ],
    ids=["workers", "no length", "shuffled"],
)
def test_loaders_of_every_kind(make, options):
    compare(Evaluated, lambda: {"loader": make(), **options})

"""Several loaders, loaders that are made again, and the order in which steps see them."""

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext import BatchSplitError
from tests.parity import (
    Classifier,
    Evaluated,
    assert_same_training,
    balanced,
    batches,
    both_ways,
    dataset,
    relative_difference,
    seeded,
    train,
)


class TwoSources(Classifier):
    """Takes a dictionary or a list of batches, of which some may have run out."""

    def training_step(self, batch, batch_idx):
        parts = [part for part in (batch.values() if isinstance(batch, dict) else batch) if part is not None]
        loss = sum(functional.cross_entropy(self.network(features), labels) for features, labels in parts)
        self.log("loss", loss, on_epoch=True, batch_size=len(parts[0][1]))
        return loss


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
@pytest.mark.parametrize("kind", [dict, list])
def test_loaders_that_are_read_at_once(mode, kind):
    def run(**way):
        loaders = {"a": batches(40), "b": batches(24)}
        loader = CombinedLoader(loaders if kind is dict else list(loaders.values()), mode)
        return train(seeded(TwoSources), **way, loader=loader)

    single, parallel = both_ways(run)
    assert_same_training(parallel, single)
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


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_validation_loaders_that_are_read_at_once(mode):
    class BothAtOnce(Evaluated):
        def validation_step(self, batch, batch_idx):
            for name, part in batch.items():
                if part is not None:
                    self.log(
                        f"val_{name}", functional.cross_entropy(self.network(part[0]), part[1]), batch_size=len(part[1])
                    )

    def run(**way):
        return train(seeded(BothAtOnce), **way, val_loader=CombinedLoader({"a": batches(16), "b": batches(24)}, mode))

    assert_same_training(*reversed(both_ways(run)))


def test_combined_loaders_with_different_sizes_are_refused_by_name():
    loaders = {"a": DataLoader(dataset(8), batch_size=8), "b": DataLoader(dataset(4), batch_size=4)}
    with pytest.raises(BatchSplitError, match=r"ambiguous: `batch\['a'\]` has 8, `batch\['b'\]` has 4"):
        train(Classifier(), balanced(), 2, loader=CombinedLoader(loaders, "min_size"))


@pytest.mark.parametrize("persistent", [False, True])
def test_loaders_with_worker_processes_work(persistent):
    def loader():
        return DataLoader(dataset(27), batch_size=8, num_workers=2, persistent_workers=persistent)

    single = train(seeded(Classifier), loader=loader())
    parallel = train(seeded(Classifier), balanced([2, 6]), 2, loader=loader())
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


class Remade(LightningDataModule):
    """Makes other data for each epoch."""

    def __init__(self):
        super().__init__()
        self.made = []

    def loader(self, stage):
        self.made.append((stage, self.trainer.current_epoch))
        return batches(27 - 5 * self.trainer.current_epoch)

    def train_dataloader(self):
        return self.loader("train")

    def val_dataloader(self):
        return self.loader("val")


@pytest.mark.parametrize("every", [0, 1, 2])
def test_loaders_made_again(every):
    def run(**way):
        data = Remade()
        trained = train(seeded(Evaluated), **way, loader=data, reload_dataloaders_every_n_epochs=every)
        return trained, data.made

    (single, expected), (parallel, found) = both_ways(run)
    assert_same_training(parallel, single)
    assert found == expected


class Stream(IterableDataset):
    def __iter__(self):
        return iter(dataset(27))


def test_data_without_a_length():
    def run(**way):
        return train(seeded(Evaluated), **way, loader=DataLoader(Stream(), batch_size=8), max_steps=6, max_epochs=-1)

    assert_same_training(*reversed(both_ways(run)))


def test_shuffled_loaders_draw_the_same_order():
    def run(**way):
        return train(seeded(Evaluated), **way, loader=batches(27, shuffle=True))

    single, parallel = both_ways(run)
    assert_same_training(parallel, single)
    ordered = train(seeded(Evaluated), balanced([2, 6]), 2)
    assert relative_difference(ordered.gradients.after_backward, single.gradients.after_backward) > 1e-3

"""Training on batches that modules cut, and from one loader or several, equals one device."""

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import functional

from lightning_ddp_ext import BatchSplitError
from tests.support.training import Classifier, balanced, batches, compare, train


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

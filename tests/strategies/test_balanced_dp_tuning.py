"""The Tuner finds on replicas what it finds on one device."""

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner, batch_size_scaling

from tests.parity import Evaluated, batches, both_ways, quiet_trainer, relative_difference, seeded


@pytest.fixture(autouse=True)
def _without_garbage_collection(monkeypatch):
    # Before every trial; with all that a test session holds in memory, it takes longer than the trial.
    monkeypatch.setattr(batch_size_scaling, "garbage_collection_cuda", lambda: None)


class Tunable(Evaluated):
    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 1e-3, 2
        self.double()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        return batches(64, self.batch_size)

    val_dataloader = train_dataloader


def test_the_learning_rate_found_is_the_same(tmp_path):
    def run(strategy, devices):
        module = seeded(Tunable)
        before = [p.clone() for p in module.parameters()]
        trainer = quiet_trainer(strategy, devices, max_epochs=1, default_root_dir=tmp_path)
        finder = Tuner(trainer).lr_find(module, num_training=25, min_lr=1e-3, max_lr=10)
        assert relative_difference(list(module.parameters()), before) == 0
        trainer.fit(module)
        return finder, module, trainer

    (expected, single, one), (found, parallel, two) = both_ways(run)
    assert found.results["lr"] == expected.results["lr"]
    assert found.results["loss"] == pytest.approx(expected.results["loss"], rel=1e-10)
    assert found.suggestion() == expected.suggestion() == parallel.lr == single.lr != 1e-3
    assert relative_difference(list(parallel.parameters()), list(single.parameters())) < 1e-10
    assert two.global_step == one.global_step == 32


class Exhausting(Tunable):
    """Runs out of memory on chunks of more than 15 samples, which is when the batch has more than 20."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > (20 if self.trainer.num_devices == 1 else 15):
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)

    validation_step = training_step


@pytest.mark.parametrize(
    ("mode", "method", "first", "size"), [("power", "fit", 8, 16), ("binsearch", "validate", 16, 20)]
)
def test_the_batch_size_found_is_the_same(tmp_path, mode, method, first, size):
    def run(strategy, devices):
        module = seeded(Exhausting)
        trainer = quiet_trainer(strategy, devices, max_epochs=1, default_root_dir=tmp_path)
        found = Tuner(trainer).scale_batch_size(
            module, mode=mode, method=method, init_val=first, steps_per_trial=1, margin=0
        )
        return found, module.batch_size

    assert both_ways(run) == ((size, size), (size, size))


def test_finders_as_callbacks(tmp_path):
    def run(strategy, devices):
        module = seeded(Tunable)
        callbacks = [BatchSizeFinder(steps_per_trial=1, max_trials=2), LearningRateFinder(num_training_steps=15)]
        trainer = quiet_trainer(strategy, devices, max_epochs=1, default_root_dir=tmp_path, callbacks=callbacks)
        trainer.fit(module)
        return module

    single, parallel = both_ways(run)
    assert (parallel.batch_size, parallel.lr) == (single.batch_size, single.lr)
    assert relative_difference(list(parallel.parameters()), list(single.parameters())) < 1e-10

"""`balance="auto"` in training: chunks move, the gradient stays, the state is saved."""

import logging
import time

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_ddp_ext.replicas.workers import current_replica
from tests.support.training import Classifier, assert_same_training, balanced, dataset, quiet_trainer, seeded, train


class Slowed(Classifier):
    """The first replica takes three times as long for a sample."""

    def training_step(self, batch, batch_idx):
        time.sleep(len(batch[0]) * (0.003, 0.001)[current_replica() or 0])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        pass


def loader(batches=24):
    return DataLoader(dataset(16 * batches), batch_size=16)


@pytest.fixture
def said(caplog):
    """Return a function that lists the messages about balance; Lightning's loggers do not propagate them."""
    logger = logging.getLogger("lightning.pytorch")
    logger.setLevel(logging.INFO)
    logger.addHandler(caplog.handler)
    yield lambda: [record.message for record in caplog.records if "`balance=" in record.message]
    logger.removeHandler(caplog.handler)


def test_chunks_move_and_the_gradient_stays(said):
    strategy = balanced(balance="auto")
    single = train(seeded(Classifier), loader=loader(), max_epochs=1)
    parallel = train(seeded(Slowed), strategy, 2, loader=loader(), max_epochs=1)
    first, second = strategy.chunk_sizes
    assert second > first + 4  # 8 and 8 at first; 4 and 12 would take equally long without the network
    assert_same_training(parallel, single)
    assert any("from 8, 8 to " in text and "replica 0 takes" in text for text in said())


def test_a_checkpoint_keeps_what_was_measured(tmp_path):
    strategy = balanced(balance="auto")
    trainer = quiet_trainer(strategy, 2, precision="64-true", max_epochs=1)
    trainer.fit(Slowed(), loader())
    learned = strategy.split_sizes(16)
    assert learned != [8, 8]
    trainer.validate(Slowed(), loader(), verbose=False)
    assert strategy.chunk_sizes == learned == strategy.split_sizes(16)  # a validation is not measured
    trainer.save_checkpoint(tmp_path / "moved.ckpt")
    assert torch.load(tmp_path / "moved.ckpt", weights_only=True)["lightning_ddp_ext.balanced_dp"]["shares"][0] < 0.5

    def resume(build, devices):
        resumed = balanced(balance="auto")
        trainer = quiet_trainer(resumed, devices, precision="64-true", max_epochs=2, limit_train_batches=1)
        trainer.fit(build(), loader(), ckpt_path=tmp_path / "moved.ckpt")
        return resumed.chunk_sizes

    assert resume(Slowed, 2) == learned
    assert resume(Classifier, 3) == [6, 5, 5]


def test_deterministic_training_is_shared_evenly(said):
    strategy = balanced(balance="auto")
    try:
        train(Slowed(), strategy, 2, max_steps=10, deterministic=True, loader=loader())
    finally:
        torch.use_deterministic_algorithms(False)
    assert strategy.chunk_sizes == [8, 8]
    assert any("measured times are not deterministic" in text for text in said())


@pytest.mark.filterwarnings("ignore:`training_step` draws random numbers")
def test_chunks_of_replicas_that_run_in_order_do_not_move(said):
    class Drawing(Slowed):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 0 * torch.rand(())

    strategy = balanced(balance="auto")
    seed_everything(0, verbose=False)
    train(seeded(Drawing), strategy, 2, loader=loader(12), max_epochs=1)
    assert strategy.chunk_sizes == [8, 8]
    assert [text for text in said() if "one after another" in text] == said()
    assert len(said()) == 1

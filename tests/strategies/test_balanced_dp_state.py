"""Checkpoints, and what a module keeps between steps."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.parity import (
    Classifier,
    Evaluated,
    assert_same_training,
    balanced,
    both_ways,
    dataset,
    quiet_trainer,
    relative_difference,
    seeded,
    train,
)


@pytest.mark.parametrize("first", ["single", "parallel"])
def test_a_checkpoint_resumes_on_the_other_number_of_devices(tmp_path, first):
    def run(strategy, devices, epochs, ckpt_path=None):
        module = seeded(Evaluated).double()  # before Lightning loads the checkpoint into it
        trainer = quiet_trainer(strategy, devices, precision="64-true", max_epochs=epochs)
        trainer.fit(module, DataLoader(dataset(27), batch_size=8), ckpt_path=ckpt_path)
        return module, trainer

    ways = {"single": ("auto", 1), "parallel": (balanced([2, 6]), 2)}
    second = "parallel" if first == "single" else "single"
    _, trainer = run(*ways[first], epochs=2)
    path = tmp_path / "half.ckpt"
    trainer.save_checkpoint(path)
    resumed, resumed_trainer = run(*ways[second], epochs=4, ckpt_path=path)
    reference, reference_trainer = run("auto", 1, epochs=4)
    assert resumed_trainer.global_step == reference_trainer.global_step
    assert relative_difference(list(resumed.parameters()), list(reference.parameters())) < 1e-12
    state = torch.load(path, weights_only=True)["state_dict"]
    assert state.keys() == Evaluated().state_dict().keys()


def test_callbacks_that_save_write_a_checkpoint_that_loads_on_one_device(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)
    trainer = quiet_trainer(
        balanced([1, 3]), 2, precision="64-true", max_epochs=2, callbacks=[checkpoint], enable_checkpointing=True
    )
    module = seeded(Evaluated)
    loader = DataLoader(dataset(27), batch_size=8)
    trainer.fit(module, loader, loader)
    loaded = Evaluated.load_from_checkpoint(checkpoint.last_model_path).double()
    features = dataset(27).tensors[0]
    torch.testing.assert_close(loaded.network(features), module.network(features), rtol=1e-6, atol=1e-6)


class Recurring(Classifier):
    """Keeps a state that a hook resets."""

    def __init__(self):
        super().__init__()
        self.state = None

    def on_train_epoch_start(self):
        self.state = None

    def training_step(self, batch, batch_idx):
        logits = self.network(batch[0])
        if self.state is not None:
            logits = logits + self.state
        self.state = logits.detach()
        return functional.cross_entropy(logits, batch[1])


@pytest.mark.filterwarnings("ignore:`self.state` was set inside a step")
def test_state_of_replicas_can_be_reset_by_a_hook():
    def loader():
        return DataLoader(dataset(24), batch_size=8)

    single = train(seeded(Recurring), loader=loader())
    parallel = train(seeded(Recurring), balanced([2, 6]), 2, loader=loader())
    assert relative_difference(parallel.gradients.after_backward, single.gradients.after_backward) < 1e-12


class Configured(Evaluated):
    def __init__(self, scale):
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        return self.hparams.scale * super().training_step(batch, batch_idx)

    def on_train_epoch_start(self):
        self.hparams.scale += 1


def test_hyperparameters_reach_the_replicas_and_the_checkpoint(tmp_path):
    def run(**way):
        trained = train(seeded(lambda: Configured(2.0)), **way)
        path = tmp_path / f"{way['devices']}.ckpt"
        trained.trainer.save_checkpoint(path)
        return trained, Configured.load_from_checkpoint(path)

    (single, expected), (parallel, found) = both_ways(run)
    assert_same_training(parallel, single)
    assert dict(found.hparams) == dict(expected.hparams)
    assert found.hparams.scale == 5

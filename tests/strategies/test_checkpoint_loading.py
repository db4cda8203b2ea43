"""Checkpoints are read as data under every strategy: those of our runs load, and code in a file does not run."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import BalancedDataParallelStrategy
from lightning_ddp_ext.demo.digits import DigitsCNN, SlowedDigitsCNN
from lightning_ddp_ext.errors import CheckpointRefusedError
from lightning_ddp_ext.strategies.base import TAKES_WEIGHTS_ONLY, refusal
from tests.parity import quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


class Touch:
    """Leaves a folder behind where it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def fit(strategy, folder, steps, **options):
    is_balanced = strategy == "balanced_dp"
    module = SlowedDigitsCNN([0.0, 0.0]) if is_balanced else DigitsCNN()
    saving = ModelCheckpoint(folder, "last", every_n_train_steps=2, enable_version_counter=False, monitor="train_loss")
    trainer = quiet_trainer(
        BalancedDataParallelStrategy(balance="auto") if is_balanced else strategy, 2 if is_balanced else 1,
        default_root_dir=folder, limit_val_batches=0, max_steps=steps, callbacks=[saving], enable_checkpointing=True,
        log_every_n_steps=1,
    )  # fmt: skip
    data = TensorDataset(torch.randn(16, 1, 8, 8), torch.randint(10, (16,)))
    trainer.fit(module, DataLoader(data, batch_size=4), **options)
    return trainer


@pytest.mark.parametrize("strategy", ["balanced_dp", "ddp_checkpoint", "ddp_join"])
def test_a_run_is_resumed_and_code_in_a_file_runs_only_on_request(strategy, tmp_path):
    fit(strategy, tmp_path, 2).strategy.teardown()
    path, hostile, made = tmp_path / "last.ckpt", tmp_path / "hostile.ckpt", tmp_path / "made"
    checkpoint = torch.load(path, weights_only=True)
    assert {"hyper_parameters", "callbacks", "optimizer_states", "loops"} <= set(checkpoint)
    assert ("lightning_ddp_ext.balanced_dp" in checkpoint) == (strategy == "balanced_dp")
    torch.save({**checkpoint, "extra": Touch(made)}, hostile)
    assert fit(strategy, tmp_path, 3, ckpt_path=str(path)).global_step == 3
    with pytest.raises(CheckpointRefusedError) as caught:
        fit(strategy, tmp_path, 3, ckpt_path=str(hostile))
    assert f"`ckpt_path={hostile}` holds `posix.mkdir`" in str(caught.value)
    assert str(caught.value).endswith(" if you trust its author.")
    assert caught.value.names == ("posix.mkdir",)
    assert not made.exists()
    if TAKES_WEIGHTS_ONLY:
        assert "Pass `weights_only=False` to `trainer.fit`" in str(caught.value)
        fit(strategy, tmp_path, 3, ckpt_path=str(hostile), weights_only=False)
        assert made.is_dir()


def test_a_file_that_is_no_checkpoint_is_named(tmp_path):
    path = tmp_path / "some.ckpt"
    for content in (b"", b"no checkpoint", b"PK\x03\x04 no checkpoint either"):
        path.write_bytes(content)
        with pytest.raises(CheckpointRefusedError, match="cannot be read as a checkpoint of tensors and plain values"):
            fit("balanced_dp", tmp_path, 3, ckpt_path=str(path))


def test_classes_are_named_where_the_file_cannot_be_listed():
    error = refusal(Path("nowhere.ckpt"), RuntimeError("Unsupported global: GLOBAL a.B was not an allowed global"))
    assert error.names == ("a.B",)

"""Checkpoints are read as data: those of our runs load, and code in a file does not run."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import BalancedDataParallelStrategy, CheckpointRefusedError
from lightning_ddp_ext.demo.digits import DigitsCNN, SlowedDigitsCNN
from lightning_ddp_ext.strategies.base import refusal

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

STRATEGIES = ["balanced_dp", "ddp_checkpoint", "ddp_join"]


class Touch:
    """Leaves a file behind where it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def loader():
    return DataLoader(TensorDataset(torch.randn(16, 1, 8, 8), torch.randint(10, (16,))), batch_size=4)


def keep(folder):
    return ModelCheckpoint(folder, "last", every_n_train_steps=2, enable_version_counter=False, monitor="train_loss")


def trainer_with(strategy, folder, **options):
    devices = 2 if strategy == "balanced_dp" else 1
    strategy = BalancedDataParallelStrategy(balance="auto") if strategy == "balanced_dp" else strategy
    return Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, **options,
    )  # fmt: skip


@pytest.fixture(scope="module", params=STRATEGIES)
def saved(request, tmp_path_factory):
    """A strategy, and the checkpoint of a run of two steps under it."""
    folder = tmp_path_factory.mktemp(request.param)
    environment = dict(os.environ)  # to which Lightning adds an address and a port
    keeping = keep(folder)
    module = SlowedDigitsCNN([0.0, 0.0]) if request.param == "balanced_dp" else DigitsCNN()
    trainer = trainer_with(request.param, folder, max_steps=2, callbacks=[keeping], log_every_n_steps=1)
    trainer.fit(module, loader())
    trainer.strategy.teardown()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    return request.param, folder / "last.ckpt", module


def with_touch(path, folder):
    """A copy of a checkpoint that makes a folder when it is loaded."""
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["extra"] = Touch(folder / "made")
    torch.save(checkpoint, folder / "hostile.ckpt")
    return folder / "hostile.ckpt"


def resume(strategy, path, module, folder, **options):
    trainer = trainer_with(strategy, folder, max_steps=3, callbacks=[keep(folder)])
    trainer.fit(module, loader(), ckpt_path=str(path), **options)
    return trainer


def test_a_run_is_resumed_by_default(saved, tmp_path):
    strategy, path, module = saved
    checkpoint = torch.load(path, weights_only=True)
    assert {"hyper_parameters", "callbacks", "optimizer_states", "loops"} <= set(checkpoint)
    assert ("lightning_ddp_ext.balanced_dp" in checkpoint) == (strategy == "balanced_dp")
    assert resume(strategy, path, module, tmp_path).global_step == 3


def test_a_file_that_runs_code_is_refused_before_it_does(saved, tmp_path):
    strategy, path, module = saved
    hostile = with_touch(path, tmp_path)
    with pytest.raises(CheckpointRefusedError) as caught:
        resume(strategy, hostile, module, tmp_path)
    assert f"`ckpt_path={hostile}` holds `posix.mkdir`" in str(caught.value)
    assert str(caught.value).endswith("Pass `weights_only=False` to `trainer.fit` if you trust its author.")
    assert caught.value.names == ("posix.mkdir",)
    assert not (tmp_path / "made").exists()


def test_it_runs_if_somebody_says_so(saved, tmp_path):
    strategy, path, module = saved
    resume(strategy, with_touch(path, tmp_path), module, tmp_path, weights_only=False)
    assert (tmp_path / "made").is_dir()


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 no checkpoint either"])
def test_a_file_that_is_no_checkpoint_is_named(tmp_path, content):
    path = tmp_path / "some.ckpt"
    path.write_bytes(content)
    with pytest.raises(CheckpointRefusedError, match="cannot be read as a checkpoint of tensors and plain values"):
        resume("balanced_dp", path, DigitsCNN(), tmp_path)


def test_classes_are_named_where_the_file_cannot_be_listed():
    error = refusal(Path("nowhere.ckpt"), RuntimeError("Unsupported global: GLOBAL a.B was not an allowed global"))
    assert error.names == ("a.B",)

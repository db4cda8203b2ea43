"""Checkpoints are read as data under every strategy: those of our runs load, and code in a file does not run."""

import io
import os
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import BalancedDataParallelStrategy
from lightning_ddp_ext.demo.digits import DigitsCNN, SlowedDigitsCNN
from lightning_ddp_ext.distributed import exchange
from lightning_ddp_ext.distributed.exchange import destroy_group
from lightning_ddp_ext.distributed.serialization import unpack
from lightning_ddp_ext.errors import CheckpointRefusedError, DDPExtError
from lightning_ddp_ext.fabric import DDPJoinStrategy
from lightning_ddp_ext.resume.checkpoint import AtomicCheckpointIO
from lightning_ddp_ext.resume.loading import TAKES_WEIGHTS_ONLY, check_checkpoint
from tests.support.processes import run_processes
from tests.support.training import quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


DATA = DataLoader(TensorDataset(torch.randn(16, 1, 8, 8), torch.randint(10, (16,))), batch_size=4)


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
    trainer.fit(module, DATA, **options)
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


STRATEGIES = ["balanced_dp", "ddp_checkpoint", "ddp_join", "balanced_ddp"]


def flipped(content, part):
    """Flip one bit of a part, which is in the file once."""
    at = content.index(part) + 3
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_damaged_file_and_one_of_another_program_are_named_with_the_reason(strategy, tmp_path):
    run = fit(strategy, tmp_path, 2)
    whole = (tmp_path / "last.ckpt").read_bytes()
    weight = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"].popitem()[1]
    path = tmp_path / "some.ckpt"
    files = {
        "wrong checksum": (flipped(whole, weight.numpy().tobytes()), "the checksum of its part `.*` is wrong"),
        "cut": (whole[:-10], "File is not a zip file"),
        "text": (b"hello\n" * 99, "File is not a zip file"),
        "empty": (b"", "File is not a zip file"),
        "weights": (in_file({"0.weight": torch.ones(2)}), "no `pytorch-lightning_version`, which a Trainer writes"),
        "list": (in_file([1]), "no `pytorch-lightning_version`"),
        "arrays": (in_file({"a": torch.ones(2).numpy()}, numpy.savez), "archive"),
    }
    for content, reason in files.values():
        path.write_bytes(content)
        for call in (partial(fit, strategy, tmp_path, 3), partial(run.validate, run.lightning_module, DATA)):
            with pytest.raises(CheckpointRefusedError, match=reason) as caught:
                call(ckpt_path=str(path))
            assert f"`ckpt_path={path}` cannot be read as a checkpoint" in str(caught.value)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointRefusedError, match="Is a directory"):
        fit(strategy, tmp_path, 3, ckpt_path=str(path))
    (tmp_path / "last.ckpt").write_bytes(files["wrong checksum"][0])
    with pytest.raises(CheckpointRefusedError, match="the checksum of its part"):
        fit(strategy, tmp_path, 3, ckpt_path="last")


def in_file(value, save=torch.save):
    file = io.BytesIO()
    if save is torch.save:
        save(value, file)
    else:
        save(file, **value)
    return file.getvalue()


def test_no_flipped_bit_is_read_in_silence(tmp_path):
    """Bytes of all parts of a file, headers too: the file is refused, or what is read is the same."""
    path, value = tmp_path / "a.ckpt", {"weight": torch.arange(4.0), "step": 3}
    torch.save(value, path)
    content, found = bytearray(path.read_bytes()), Counter()
    for at in range(0, len(content), 3):
        content[at] ^= 1 << at % 8
        path.write_bytes(content)
        content[at] ^= 1 << at % 8
        try:
            check_checkpoint(path, TorchCheckpointIO(), allows_code=False)
            loaded = torch.load(path, weights_only=True)
        except (CheckpointRefusedError, RuntimeError) as error:
            found[type(error).__name__] += 1
        else:
            found["read"] += 1
            assert torch.equal(loaded["weight"], value["weight"])
            assert loaded["step"] == 3
    assert found["CheckpointRefusedError"] > 200
    assert found["RuntimeError"] < 5  # of torch, about a part that is missing


def test_files_without_checksums_and_of_other_plugins_are_left_to_these(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.ones(2)}, tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    check_checkpoint(tmp_path / "a.ckpt", TorchCheckpointIO(), allows_code=False)
    (tmp_path / "b.ckpt").write_bytes(b"of a plugin")
    with pytest.raises(CheckpointRefusedError):
        check_checkpoint(tmp_path / "b.ckpt", AsyncCheckpointIO(AtomicCheckpointIO()), allows_code=False)
    check_checkpoint(tmp_path / "b.ckpt", OwnIO(), allows_code=False)


class OwnIO(TorchCheckpointIO):
    """Reads another format."""

    def load_checkpoint(self, path, *args, **kwargs):
        return {}


def test_fabric_refuses_a_damaged_file_and_one_without_what_is_asked_for(tmp_path):
    path = tmp_path / "a.ckpt"
    fabric = Fabric(accelerator="cpu", devices=1, strategy=DDPJoinStrategy())
    fabric.launch()
    try:
        model = fabric.setup(torch.nn.Linear(2, 2))
        fabric.save(path, {"model": model})
        content = path.read_bytes()
        path.write_bytes(flipped(content, model.weight.detach().numpy().tobytes()))
        with pytest.raises(CheckpointRefusedError, match=rf"`path={path}` .*the checksum of its part"):
            fabric.load(path, {"model": model})
        path.write_bytes(content)
        with pytest.raises(CheckpointRefusedError, match=rf"`path={path}` .* 'optimizer'"):
            fabric.load(path, {"optimizer": 0})
        fabric.load(path, {"model": model})
    finally:
        destroy_group()


def save_and_resume(folder):
    """Save on two ranks, and resume from a file that is damaged on one of them; return what each rank did."""
    decoded = []
    with mock.patch.object(exchange, "unpack", lambda *args: decoded.append(args) or unpack(*args)):
        fitted = train(folder, lambda run: decoded.clear() or run.save_checkpoint(f"{folder}/a.ckpt"))
    number = len(decoded)
    path = Path(folder) / f"of rank {fitted.global_rank}.ckpt"
    path.write_bytes(Path(folder, "a.ckpt").read_bytes()[: -10 * fitted.global_rank or None])
    try:
        train(folder, lambda run: None, ckpt_path=str(path))
    except DDPExtError as error:
        return number, f"{type(error).__name__}: {error}"
    return number, None


def train(folder, at_the_second_batch, **options):
    class Saving(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 1:
                at_the_second_batch(trainer)

    run = quiet_trainer("ddp_checkpoint", 2, default_root_dir=folder, max_epochs=2, max_steps=4, callbacks=[Saving()])
    run.fit(DigitsCNN(), DATA, **options)
    return run


@pytest.mark.slow
def test_ranks_keep_their_states_to_themselves_and_hear_of_a_file_that_is_damaged_for_one(tmp_path):
    (first, error), (second, own_error) = run_processes(save_and_resume, 2, str(tmp_path), timeout=60)
    assert (first, second) == (0, 0)
    assert own_error.startswith("CheckpointRefusedError: `ckpt_path=")
    assert error.startswith("OtherRankError: rank 1 failed: CheckpointRefusedError: `ckpt_path=")

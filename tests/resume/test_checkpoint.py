import errno
import os
import signal
import subprocess
import time

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_ddp_ext import DDPCheckpointStrategy
from lightning_ddp_ext.cli.settings import describe
from lightning_ddp_ext.resume.checkpoint import AtomicCheckpointIO
from tests.support.processes import run_processes


class Unpicklable:
    def __reduce__(self):
        raise ArithmeticError("cannot be saved")


def test_a_checkpoint_is_saved_and_loaded_and_a_save_that_fails_leaves_the_one_before(tmp_path):
    path = tmp_path / "new" / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weight": torch.ones(3)}, path)
    with pytest.raises(ArithmeticError, match="cannot be saved"):
        AtomicCheckpointIO().save_checkpoint({"number": 2, "other": Unpicklable()}, path)
    assert torch.equal(torch.load(path, weights_only=True)["weight"], torch.ones(3))
    assert [entry.name for entry in path.parent.iterdir()] == ["a.ckpt"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which needs root")
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], check=True)
    try:
        path = tmp_path / "a.ckpt"
        AtomicCheckpointIO().save_checkpoint({"number": 1}, path)
        with pytest.raises(OSError, match="no space left for the checkpoint") as raised:
            AtomicCheckpointIO().save_checkpoint({"weight": torch.ones(2**20)}, path)
        assert raised.value.errno == errno.ENOSPC
        assert describe(raised.value).count("Free ") == 1  # the advice of the command
        assert torch.load(path, weights_only=True) == {"number": 1}
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_partial_file_is_not_taken_for_a_checkpoint(tmp_path, monkeypatch):
    """Lightning looks for the number behind this name in all names of a folder."""
    names = []
    monkeypatch.setattr(torch, "save", lambda *_: names.extend(path.name for path in tmp_path.iterdir()))
    AtomicCheckpointIO().save_checkpoint({}, tmp_path / "hpc_ckpt_2.ckpt")
    assert len(names) == 1
    assert "hpc_ckpt" not in names[0]


def test_a_plugin_that_leaves_writing_to_another_one_is_taken_and_one_of_the_users_kept():
    plugin, own = AsyncCheckpointIO(), TorchCheckpointIO()
    trainer = Trainer(strategy="ddp_join", plugins=[plugin], accelerator="cpu", devices=2, logger=False)
    assert trainer.strategy.checkpoint_io is plugin
    assert isinstance(plugin.checkpoint_io, AtomicCheckpointIO)
    assert DDPCheckpointStrategy(checkpoint_io=own).checkpoint_io is own


def kill_while_saving(path, moment):
    """Save again and again in a process that is killed some seconds after the first checkpoint."""
    process = os.fork()
    if process == 0:
        for number in range(10**6):
            AtomicCheckpointIO().save_checkpoint({"number": number, "weight": torch.zeros(2**18)}, path)
    while not os.path.exists(path):
        time.sleep(0.001)
    time.sleep(moment)
    os.kill(process, signal.SIGKILL)
    return os.waitpid(process, 0)[1]


def test_a_process_that_is_killed_while_it_saves_leaves_a_checkpoint(tmp_path):
    path = tmp_path / "a.ckpt"
    assert run_processes(kill_while_saving, 1, str(path), 0.02) == [signal.SIGKILL]
    assert torch.load(path, weights_only=True)["weight"].shape == (2**18,)

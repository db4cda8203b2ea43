"""What the training command does with what its folder holds already."""

import os
import stat
from types import SimpleNamespace

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf

from lightning_ddp_ext.cli.train import checkpoint_to_resume, keep_config


@pytest.mark.parametrize(
    ("restarts", "saved", "given", "expected"),
    [
        ("0", ["hpc_ckpt_1"], "first.ckpt", "first.ckpt"),  # of another job
        ("1", [], "first.ckpt", "first.ckpt"),
        ("1", ["hpc_ckpt_1"], "first.ckpt", "hpc"),
        ("1", ["hpc_ckpt_1"], None, "hpc"),
        ("1", ["hpc_ckpt_1"], "last", "hpc"),
        ("1", [], None, "last"),  # of which Lightning says that there is none
        ("1", ["checkpoints/last", "hpc_ckpt_1"], "last", "hpc"),
        ("2", ["hpc_ckpt_1", "checkpoints/last"], "last", "last"),
        # a node has failed
        ("1", ["checkpoints/last"], None, "last"),
        ("1", ["checkpoints/last"], "first.ckpt", "last"),
        ("2", ["hpc_ckpt_1", "checkpoints/last"], None, "last"),
        ("2", ["hpc_ckpt_1", "checkpoints/last-v1"], "first.ckpt", "last"),
        ("2", ["hpc_ckpt_1", "checkpoints/epoch=7"], None, "hpc"),  # which is not the last for Lightning
    ],
)
def test_a_job_that_starts_again_goes_on_from_its_newest_checkpoint(
    tmp_path, monkeypatch, restarts, saved, given, expected
):
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    (tmp_path / "checkpoints").mkdir()
    for age, name in enumerate(reversed(saved)):
        path = tmp_path / f"{name}.ckpt"
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    callback = ModelCheckpoint(tmp_path / "checkpoints")
    trainer = SimpleNamespace(default_root_dir=str(tmp_path), checkpoint_callbacks=[callback])
    assert checkpoint_to_resume(given, trainer) == expected


def test_the_configuration_is_for_the_owner_only_also_where_there_was_one(tmp_path):
    path = tmp_path / "config.yaml"
    path.touch(mode=0o644)
    keep_config(OmegaConf.create({"key": "secret"}), tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "secret" in path.read_text()


def test_a_job_that_starts_again_without_any_checkpoint_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    trainer = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ModelCheckpoint(tmp_path / "checkpoints")],
    )  # fmt: skip
    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        trainer.fit(BoringModel(), ckpt_path=checkpoint_to_resume(None, trainer))
    assert trainer.global_step == 1

"""The run folder: configuration, checkpoints of earlier starts, and the plot."""

import importlib.util
import os
import stat
from types import SimpleNamespace

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf

from lightning_ddp_ext.callbacks import BalanceReport
from lightning_ddp_ext.callbacks.balance_report import ReplicaRecord
from lightning_ddp_ext.cli.report import draw_run
from lightning_ddp_ext.cli.train import checkpoint_to_resume, keep_config


@pytest.mark.parametrize(
    ("restarts", "saved", "given", "expected"),
    [
        ("0", ["hpc_ckpt_1"], "first.ckpt", "first.ckpt"),  # left by another job
        ("1", [], "first.ckpt", "first.ckpt"),
        ("1", ["hpc_ckpt_1"], "first.ckpt", "hpc"),
        ("1", ["hpc_ckpt_1"], "last", "hpc"),
        ("1", [], None, "last"),  # Lightning warns that there is none
        ("1", ["checkpoints/last", "hpc_ckpt_1"], "last", "hpc"),
        ("2", ["hpc_ckpt_1", "checkpoints/last"], "last", "last"),
        # a node has failed
        ("1", ["checkpoints/last"], None, "last"),
        ("2", ["hpc_ckpt_1", "checkpoints/last-v1"], "first.ckpt", "last"),
        ("2", ["hpc_ckpt_1", "checkpoints/epoch=7"], None, "hpc"),  # not `last` for Lightning
    ],
)
def test_a_requeued_job_resumes_from_its_newest_checkpoint(tmp_path, monkeypatch, restarts, saved, given, expected):
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    (tmp_path / "checkpoints").mkdir()
    for age, name in enumerate(reversed(saved)):
        path = tmp_path / f"{name}.ckpt"
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    callback = ModelCheckpoint(tmp_path / "checkpoints")
    trainer = SimpleNamespace(default_root_dir=str(tmp_path), checkpoint_callbacks=[callback])
    assert checkpoint_to_resume(given, trainer) == expected


def test_the_configuration_is_readable_by_the_owner_only(tmp_path):
    path = tmp_path / "config.yaml"
    path.touch(mode=0o644)
    keep_config(OmegaConf.create({"key": "secret"}), tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "secret" in path.read_text()


def test_a_requeued_job_without_a_checkpoint_starts_from_the_beginning(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    trainer = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ModelCheckpoint(tmp_path / "checkpoints")],
    )  # fmt: skip
    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        trainer.fit(BoringModel(), ckpt_path=checkpoint_to_resume(None, trainer))
    assert trainer.global_step == 1


def trainer_with_records():
    report = BalanceReport()
    report.records = [ReplicaRecord(batch, replica, "cpu", 4, 0.01, 0.0) for batch in range(20) for replica in (0, 1)]
    return SimpleNamespace(callbacks=[report])


def test_curves_and_replicas_are_drawn(tmp_path, monkeypatch):
    draw_run(tmp_path, SimpleNamespace(callbacks=[]))  # nothing to draw
    assert not list(tmp_path.iterdir())
    find_spec = importlib.util.find_spec
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
        with pytest.warns(UserWarning, match=r"Install `lightning-ddp-ext\[demo\]`"):
            draw_run(tmp_path, trainer_with_records())
    assert not list(tmp_path.iterdir())
    (tmp_path / "metrics.csv").write_text("step,epoch,train_loss,accuracy\n1,0,0.5,\n2,0,,0.9\n3,0,0.4,\n")
    draw_run(tmp_path, trainer_with_records())
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")

"""Launches that are refused before any rank waits for another, and the run folder."""

import os
import shutil
import socket
import stat
from types import SimpleNamespace

import pytest
import torch
from hydra.types import RunMode
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from omegaconf import OmegaConf

from lightning_ddp_ext.cli import validate
from lightning_ddp_ext.cli.run_report import LaunchSummary
from lightning_ddp_ext.cli.settings import LaunchError
from lightning_ddp_ext.cli.train import checkpoint_to_resume, keep_config
from lightning_ddp_ext.cli.validate import check_run, has_process_group, prepare_config
from lightning_ddp_ext.errors import ClusterError
from tests.cli.commands import command
from tests.support.training import quiet_trainer

SCRIPT = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NNODES": "1", "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2",
}  # fmt: skip
TASK = {
    **SCRIPT, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
}  # fmt: skip


def test_a_launch_that_does_not_fit_is_refused(call_main):
    for environ, overrides, part in (  # variables of a launch stay set in the next
        ({"OMPI_COMM_WORLD_SIZE": "3"}, [], "a launcher has started `OMPI_COMM_WORLD_SIZE=3`"),
        ({"OMPI_COMM_WORLD_SIZE": "1", **SCRIPT}, ["strategy=ddp"], "Put `srun` before the command"),
        (TASK, ["strategy=ddp", "trainer.devices=3"], "rank 2 is missing"),
    ):
        code, printed = call_main(*overrides, "trainer.accelerator=cpu", **environ)
        assert printed.err.count("\n") == 1, printed.err
        (line,) = printed.err.splitlines()
        assert (code, line.startswith("lightning-ddp-ext: "), part in line) == (1, True, True), line


@pytest.mark.slow
def test_a_port_that_rank_0_cannot_have_ends_every_rank_with_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other.getsockname()[1])}
        done = command(tmp_path, "strategy=ddp", "trainer.devices=2", "logger=none", code=1, **environ)
    assert "Traceback" not in done.stderr
    messages = [line for line in done.stderr.splitlines() if line.startswith("lightning-ddp-ext: ")]
    assert any("Address already in use. Choose another port" in message for message in messages), messages


def test_strategies_with_a_process_group_are_known_by_their_class():
    for target, expected in {
        "lightning.pytorch.strategies.DDPStrategy": True,  # without the settings of the packaged options
        "lightning.pytorch.strategies.ModelParallelStrategy": True,
        "lightning.pytorch.strategies.SingleDeviceStrategy": False,
        "lightning_ddp_ext.DDPJoinStrategy": True,
        "lightning_ddp_ext.BalancedDataParallelStrategy": False,
        "lightning_ddp_ext.strategies.connected.ConnectedDDPStrategy": True,
        "lightning_ddp_ext.strategies.connected.single_device_strategy": False,
        "nosuch.Strategy": True,  # an error of the run, which has its own message
    }.items():
        assert has_process_group(OmegaConf.create({"strategy": {"_target_": target}})) == expected, target


def test_runs_of_a_rank_without_the_others_and_in_separate_folders_are_refused(monkeypatch):
    def check(world_size=1, environment=None, cluster=None, folder="runs/mine", mode=RunMode.RUN):
        config = OmegaConf.create({"cluster": cluster or {}, "data": {}, "strategy": {}})
        hydra = OmegaConf.create({"run": {"dir": folder}, "mode": mode, "runtime": {"choices": {"strategy": "plain"}}})
        strategy = SimpleNamespace(cluster_environment=environment)
        numbers = {"world_size": world_size, "num_nodes": 1, "num_devices": world_size}
        check_run(config, hydra, SimpleNamespace(strategy=strategy, **numbers))

    folder, slurm = "runs/${now:%H-%M-%S}", SLURMEnvironment()
    for mode in (RunMode.RUN, None):
        with pytest.raises(LaunchError, match="separate run folder"):
            check(environment=slurm, folder=folder, mode=mode)
    check(environment=slurm, folder=folder, mode=RunMode.MULTIRUN)
    check(environment=slurm, folder=folder, cluster={"_target_": "an.Environment"})
    check(environment=slurm, folder="runs/mine")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check(world_size=2)
    with pytest.raises(LaunchError, match="a launcher has started `WORLD_SIZE=2`"):
        check(world_size=1)
    monkeypatch.delenv("WORLD_SIZE")
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    check(world_size=2, environment=slurm)
    with pytest.raises(ClusterError, match="rank 2 is missing"):  # a strategy of Lightning would wait for it
        check(world_size=3, environment=slurm)


def test_a_run_uses_the_accelerator_of_the_machine(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setitem(AcceleratorRegistry, "registered", {})
    for kind, strategy, *expected in (
        ("cpu", "ddp_join", "cpu", 2),
        ("cuda", "ddp_join", "cuda", 3),
        ("cuda", "single", "cuda", 1),
        ("registered", "balanced_dp", "registered", 3),
        ("unknown", "ddp_join", "cpu", 2),  # to Lightning
        ("mps", "single", "mps", 1),
        ("mps", "ddp_join", "cpu", 2),  # Lightning trains in one process there
    ):
        monkeypatch.setattr(validate, "find_accelerator", lambda kind=kind: kind)
        trainer = {"accelerator": None, "devices": None, "num_nodes": 1}
        config = {"ckpt_path": None, "network": None, "process_group": None, "seed": 0, "trainer": trainer}
        config = OmegaConf.create({**config, "strategy": {"_target_": "lightning_ddp_ext.DDPJoinStrategy"}})
        prepare_config(config, OmegaConf.create({"strategy": strategy}))
        assert [config.trainer.accelerator, config.trainer.devices] == expected, kind


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
    callbacks = [ModelCheckpoint(tmp_path / "checkpoints")]
    trainer = quiet_trainer(default_root_dir=tmp_path, max_steps=1, enable_checkpointing=True, callbacks=callbacks)
    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        trainer.fit(BoringModel(), ckpt_path=checkpoint_to_resume(None, trainer))
    assert trainer.global_step == 1


@pytest.mark.filterwarnings("ignore:.*(no last checkpoint available|exists and is not empty)")
def test_the_launch_shows_model_data_and_checkpoint(tmp_path, capsys):
    def launch(path):
        summary = LaunchSummary(tmp_path, "single")
        summary.resumes = path
        callbacks = [summary, ModelCheckpoint(tmp_path / "checkpoints", "last")]
        trainer = quiet_trainer(default_root_dir=tmp_path, max_steps=1, enable_checkpointing=True, callbacks=callbacks)
        trainer.fit(BoringModel(), datamodule=BoringDataModule(), ckpt_path=path)
        return " ".join(capsys.readouterr().out.split())

    assert "│ model │ BoringModel │ │ data │ BoringDataModule │ │ devices │" in launch(None)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.warns(
        UserWarning, match="`ckpt_path=last` finds no checkpoint, and training starts from the beginning"
    ):
        assert "│ checkpoint │ none: training starts from the beginning │" in launch("last")
    assert "last.ckpt" in launch("last")

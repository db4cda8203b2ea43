"""Launches that are refused before any rank waits for another."""

import socket
from types import SimpleNamespace

import pytest
from hydra.types import RunMode
from lightning.fabric.plugins.environments import SLURMEnvironment
from omegaconf import OmegaConf

from lightning_ddp_ext.cli.errors import LaunchError
from lightning_ddp_ext.cli.validate import (
    check_run,
    find_launcher,
    find_slurm_problems,
    has_process_group,
    is_started_alone,
)
from tests.cli.commands import command

SCRIPT = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NNODES": "1", "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2",
}  # fmt: skip
TASK = {**SCRIPT, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}


@pytest.fixture
def refuse(call_main):
    """Run the training command, which has to end with one line."""

    def run(*overrides, **environ):
        code, printed = call_main(*overrides, "trainer.accelerator=cpu", **environ)
        assert code == 1
        (line,) = printed.err.splitlines()
        assert line.startswith("lightning-ddp-ext: ")
        return line

    return run


@pytest.mark.parametrize(
    ("environ", "overrides", "part"),
    [
        (SCRIPT, ["strategy=ddp"], "Put `srun` before the command"),
        (TASK, ["strategy=ddp", "trainer.devices=3"], "rank 2 is missing"),
        ({**TASK, "SLURM_JOB_NAME": "bash"}, ["strategy=ddp"], "`SLURM_JOB_NAME=bash`"),
        ({**TASK, "SLURM_NNODES": "2", "SLURM_NTASKS": "4"}, ["strategy=ddp"], "Set `num_nodes=2`"),
        (
            {"OMPI_COMM_WORLD_SIZE": "3"},
            ["strategy=balanced_dp"],
            "`strategy=balanced_dp` runs in one process, and a launcher has started `OMPI_COMM_WORLD_SIZE=3`",
        ),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(refuse, environ, overrides, part):
    assert part in refuse(*overrides, **environ)


@pytest.mark.slow
def test_a_port_that_rank_0_cannot_have_ends_every_rank_with_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other.getsockname()[1])}
        done = command(tmp_path, "strategy=ddp", "trainer.devices=2", "logger=none", **environ)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    messages = [line for line in done.stderr.splitlines() if line.startswith("lightning-ddp-ext: ")]
    assert any("Address already in use by" in message for message in messages)


@pytest.mark.parametrize(
    ("environ", "found", "is_alone"),
    [
        ({}, None, False),
        ({"WORLD_SIZE": "1"}, None, True),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE", False),
        ({"SLURM_STEP_NUM_TASKS": "1"}, None, True),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS", False),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "4000"}, None, False),
    ],
)
def test_launchers_are_distinguished_from_interactive_shells(monkeypatch, environ, found, is_alone):
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PTY_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert find_launcher() == found
    assert is_started_alone() == is_alone


def test_strategies_with_a_process_group_are_known_by_their_class():
    several = {
        "lightning.pytorch.strategies.DDPStrategy": True,  # without the settings of the packaged options
        "lightning.pytorch.strategies.ModelParallelStrategy": True,
        "lightning.pytorch.strategies.SingleDeviceStrategy": False,
        "lightning_ddp_ext.DDPJoinStrategy": True,
        "lightning_ddp_ext.BalancedDataParallelStrategy": False,
        "lightning_ddp_ext.strategies.builtin.ddp_strategy": True,
        "lightning_ddp_ext.strategies.builtin.single_device_strategy": False,
        "nosuch.Strategy": True,  # an error of the run, which has its own message
    }
    found = {target: has_process_group(OmegaConf.create({"strategy": {"_target_": target}})) for target in several}
    assert found == several


def check(world_size=1, environment=None, cluster=None, folder="runs/mine", mode=RunMode.RUN):
    """Check a run of a Trainer with this world size and cluster environment."""
    config = OmegaConf.create({"cluster": cluster or {}, "data": {}})
    hydra = OmegaConf.create({"run": {"dir": folder}, "mode": mode, "runtime": {"choices": {"strategy": "plain"}}})
    strategy = SimpleNamespace(cluster_environment=environment)
    check_run(config, hydra, SimpleNamespace(strategy=strategy, world_size=world_size, num_nodes=1))


def test_a_rank_of_several_is_not_refused_as_a_run_of_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check(world_size=2)
    with pytest.raises(LaunchError, match="a launcher has started `WORLD_SIZE=2`"):
        check(world_size=1)


def test_a_slurm_job_whose_tasks_do_not_share_a_folder_is_refused():
    folder, slurm = "runs/${now:%H-%M-%S}", SLURMEnvironment()
    for mode in (RunMode.RUN, None):
        with pytest.raises(LaunchError, match="separate run folder"):
            check(environment=slurm, folder=folder, mode=mode)
    check(environment=slurm, folder=folder, mode=RunMode.MULTIRUN)
    check(environment=slurm, folder=folder, cluster={"_target_": "an.Environment"})
    check(environment=slurm, folder="runs/mine")


def test_devices_are_counted_as_the_trainer_does(monkeypatch):
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)

    def problems(**changes):
        trainer = {"devices": 2, "accelerator": "cpu", "num_nodes": 1, "plugins": None, **changes}
        strategy = {"_target_": "lightning_ddp_ext.DDPJoinStrategy"}
        config = {"strategy": strategy, "trainer": trainer, "cluster": {"num_nodes": 1}}
        return find_slurm_problems(OmegaConf.create(config))

    assert [devices for devices in (2, "2", [0, 1], "0,1", "0,1,") if problems(devices=devices)] == []
    assert len(problems(devices=[0, 1, 2])) == 1
    assert problems(devices="auto") == []  # unknown before the Trainer is constructed
    assert problems(devices=[0, 1, 2], plugins=["my_environment"]) == []
    for name in ("NODE_RANK", "LOCAL_RANK"):  # the user sets the ranks
        with monkeypatch.context() as by_hand:
            by_hand.setenv(name, "29500")
            assert problems(devices=[0, 1, 2]) == []

"""What keeps the training command from starting, before it waits for anybody."""

import socket
from types import SimpleNamespace

import pytest
from hydra.types import RunMode
from lightning.fabric.plugins.environments import SLURMEnvironment
from omegaconf import OmegaConf

from lightning_ddp_ext.cli.errors import LaunchError
from lightning_ddp_ext.cli.sweep import needs_processes_of_its_own
from lightning_ddp_ext.cli.validation import (
    check_folder,
    check_launcher,
    find_launcher,
    find_slurm_problems,
    has_process_group,
    is_started_alone,
)

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
        (SCRIPT, [], "Put `srun` before the command"),
        (TASK, ["trainer.devices=3"], "rank 2 is missing"),
        ({**TASK, "SLURM_JOB_NAME": "bash"}, [], "`SLURM_JOB_NAME=bash`"),
        ({**TASK, "SLURM_NNODES": "2", "SLURM_NTASKS": "4"}, [], "Set `num_nodes=2`"),
    ],
)
def test_a_job_of_slurm_that_does_not_fit_is_refused(refuse, environ, overrides, part):
    assert part in refuse("strategy=ddp", *overrides, **environ)


def test_a_port_that_rank_0_cannot_have_is_refused_before_ranks_are_started(refuse):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        by_hand = ["cluster=manual", "cluster.num_nodes=1", "cluster.node_rank=0", "cluster.main_address=127.0.0.1"]
        assert f"port {port} of node" in refuse("strategy=ddp_join", *by_hand, f"cluster.main_port={port}")
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        assert "already in use by" in refuse("strategy=ddp", "trainer.devices=2", **environ)


def test_an_interface_in_the_environment_that_the_host_lacks_is_refused(refuse):
    line = refuse("strategy=ddp", "process_group=gloo", "network=auto", GLOO_SOCKET_IFNAME="nosuch0")
    assert "`nosuch0` in the environment variable `GLOO_SOCKET_IFNAME`" in line


def test_a_launcher_of_several_processes_is_refused_by_strategies_of_one(refuse):
    line = refuse("strategy=balanced_dp", OMPI_COMM_WORLD_SIZE="3")
    assert "`strategy=balanced_dp` runs in one process" in line
    assert "`OMPI_COMM_WORLD_SIZE=3`" in line


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
def test_launchers_are_told_from_shells_for_people(monkeypatch, environ, found, is_alone):
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PTY_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert find_launcher() == found
    assert is_started_alone() == is_alone


@pytest.mark.parametrize(
    ("target", "is_several"),
    [
        ("lightning.pytorch.strategies.DDPStrategy", True),  # without the settings of the packaged options
        ("lightning.pytorch.strategies.ModelParallelStrategy", True),
        ("lightning.pytorch.strategies.SingleDeviceStrategy", False),
        ("lightning_ddp_ext.DDPJoinStrategy", True),
        ("lightning_ddp_ext.BalancedDataParallelStrategy", False),
        ("lightning_ddp_ext.strategies.builtin.ddp_strategy", True),
        ("lightning_ddp_ext.strategies.builtin.single_device_strategy", False),
        ("nosuch.Strategy", True),  # an error of the run, which has its own message
    ],
)
def test_strategies_of_several_processes_are_known_by_their_class(monkeypatch, target, is_several):
    monkeypatch.delenv("SUBMITIT_EXECUTOR", raising=False)
    config = OmegaConf.create({"strategy": {"_target_": target}})
    assert has_process_group(config) == is_several
    assert needs_processes_of_its_own(config) == is_several


def test_a_rank_that_lightning_has_started_is_no_run_of_its_own(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_launcher("plain", SimpleNamespace(world_size=2))
    with pytest.raises(LaunchError, match="a launcher has started `WORLD_SIZE=2`"):
        check_launcher("plain", SimpleNamespace(world_size=1))


@pytest.mark.parametrize(
    ("folder", "mode", "cluster", "is_refused"),
    [
        ("runs/${now:%H-%M-%S}", RunMode.RUN, {}, True),
        ("runs/${now:%H-%M-%S}", None, {}, True),
        ("runs/${now:%H-%M-%S}", RunMode.MULTIRUN, {}, False),
        ("runs/${now:%H-%M-%S}", RunMode.RUN, {"_target_": "an.Environment"}, False),
        ("runs/mine", RunMode.RUN, {}, False),
    ],
)
def test_a_job_of_slurm_whose_folder_nobody_would_find_again_is_refused(folder, mode, cluster, is_refused):
    config = OmegaConf.create({"cluster": cluster})
    hydra = OmegaConf.create({"run": {"dir": folder}, "mode": mode})
    trainer = SimpleNamespace(strategy=SimpleNamespace(cluster_environment=SLURMEnvironment()))
    if not is_refused:
        check_folder(config, hydra, trainer)
        return
    with pytest.raises(LaunchError, match="run folder of its own"):
        check_folder(config, hydra, trainer)


@pytest.mark.parametrize("devices", [2, "2", [0, 1], "0,1", "0,1,"])
def test_devices_are_counted_as_the_trainer_does(monkeypatch, devices):
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)

    def problems(**changes):
        trainer = {"devices": devices, "accelerator": "cpu", "num_nodes": 1, "plugins": None, **changes}
        cluster = {"num_nodes": 1}
        return find_slurm_problems(
            OmegaConf.create(
                {"strategy": {"_target_": "lightning_ddp_ext.DDPJoinStrategy"}, "trainer": trainer, "cluster": cluster}
            )
        )

    assert problems() == []
    assert len(problems(devices=[0, 1, 2])) == 1
    assert problems(devices="auto") == []  # unknown before the Trainer is made
    assert problems(devices=[0, 1, 2], plugins=["my_environment"]) == []
    for name in ("NODE_RANK", "LOCAL_RANK"):  # somebody has set the ranks by hand
        with monkeypatch.context() as by_hand:
            by_hand.setenv(name, "29500")
            assert problems(devices=[0, 1, 2]) == []

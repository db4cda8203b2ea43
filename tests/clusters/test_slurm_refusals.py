"""What is refused in a job of SLURM, in the environments that real jobs have."""

import os
import time

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_ddp_ext import CheckedSLURMEnvironment, ClusterError
from lightning_ddp_ext.clusters.environments import rendezvous_port

SOON = 5.0  # seconds

SRUN = ("srun", "--immediate=30")
# How a process is started; "script" is a batch script without `srun`.
STARTS = {
    "fits": (*SRUN, "--nodes=2", "--ntasks-per-node=1"),
    "four tasks": (*SRUN, "--nodes=2", "--ntasks-per-node=2"),
    "one task": (*SRUN, "--nodes=1", "--ntasks=1"),
    "bash": (*SRUN, "--nodes=2", "--ntasks-per-node=1", "--job-name=bash"),
    "bash on one node": (*SRUN, "--nodes=1", "--ntasks-per-node=2", "--job-name=bash"),
    "tasks alone": (*SRUN, "--nodes=2", "--ntasks=2"),
    "shell": ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--job-name=interactive"),
    "script": ("--nodes=2", "--ntasks-per-node=1"),
    "script without tasks": ("--nodes=2",),
    "script on one node": ("--nodes=1",),
}


@pytest.fixture(scope="session")
def environments(_cluster):
    """The variables of SLURM for each way to start a process, asked for when they are needed."""
    known = {"no job": {}}

    def of(start):
        if start not in known:
            known[start] = _cluster.variables(*STARTS[start])
        return known[start]

    return of


@pytest.fixture
def become(environments, monkeypatch):
    """Give this process the environment of one that was started in some way."""

    def start(name):
        for variable in [variable for variable in os.environ if variable.startswith(("SLURM", "MASTER_"))]:
            monkeypatch.delenv(variable)
        for variable, value in environments(name).items():
            monkeypatch.setenv(variable, value)

    return start


def trainer(num_nodes, devices, *plugins, strategy="ddp_join"):
    return Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, num_nodes=num_nodes, plugins=list(plugins), logger=False
    )  # fmt: skip


def test_tasks_that_fit_are_the_ranks(become):
    become("fits")
    made = trainer(2, 1, CheckedSLURMEnvironment(num_nodes=2))
    assert (made.world_size, made.global_rank, made.strategy.cluster_environment.main_address) == (2, 0, "node1")
    become("tasks alone")
    assert trainer(2, 1, CheckedSLURMEnvironment()).world_size == 2
    become("one task")
    assert trainer(1, 1, CheckedSLURMEnvironment()).world_size == 1
    become("four tasks")
    assert trainer(2, 2, CheckedSLURMEnvironment(requeue_signal="SIGUSR2")).world_size == 4


@pytest.mark.parametrize(
    ("start", "num_nodes", "devices", "parts"),
    [
        ("fits", 2, 2, ["`SLURM_NTASKS=2`", "`devices=2`", "ranks 2 to 3 are missing", "--ntasks-per-node=2`"]),
        ("script", 2, 1, ["`SLURM_JOB_ID=", "`srun` has not started it", "Put `srun` before"]),
        ("shell", 2, 1, ["`SLURM_PROCID` is not set", "Put `srun` before"]),
        ("no job", 2, 1, ["`SLURM_JOB_ID` is not set"]),
    ],
)
def test_tasks_that_do_not_fit_are_refused_at_once(become, start, num_nodes, devices, parts):
    become(start)
    began = time.monotonic()
    with pytest.raises(ClusterError) as refused:
        trainer(num_nodes, devices, CheckedSLURMEnvironment())
    assert time.monotonic() - began < SOON
    for part in parts:
        assert part in str(refused.value)


def test_strategies_of_lightning_other_numbers_of_nodes_and_unknown_signals_are_refused(become):
    become("fits")
    made = trainer(2, 2, CheckedSLURMEnvironment(), strategy="ddp")
    with pytest.raises(ClusterError, match="ranks 2 to 3 are missing"):
        made.strategy.launcher.launch(lambda: None)
    with pytest.raises(ClusterError, match="`num_nodes=2` of the Trainer differs from `num_nodes=3` of the cluster"):
        trainer(2, 1, CheckedSLURMEnvironment(num_nodes=3))
    with pytest.raises(ValueError, match="`requeue_signal=USR1` is not a signal"):
        CheckedSLURMEnvironment(requeue_signal="USR1")


@pytest.mark.parametrize(
    ("start", "num_nodes", "devices", "detected", "message"),
    [
        ("script", 2, 1, SLURMEnvironment, "the only one of 2"),
        ("fits", 2, 2, SLURMEnvironment, "ranks 2 to 3 are missing"),
        ("script without tasks", 2, 1, LightningEnvironment, "the only one of 2"),
        ("shell", 2, 1, LightningEnvironment, "the only one of 2"),
        ("bash", 2, 1, LightningEnvironment, "`SLURM_JOB_NAME=bash`"),
        ("bash on one node", 1, 2, LightningEnvironment, "`SLURM_JOB_NAME=bash`"),
    ],
)
def test_silent_mistakes_are_refused_without_the_plugin_too(become, start, num_nodes, devices, detected, message):
    become(start)
    accepted = trainer(num_nodes, devices, strategy="ddp")
    assert type(accepted.strategy.cluster_environment) is detected
    for strategy in ("ddp_join", "ddp_checkpoint"):
        with pytest.raises(ClusterError, match=message):
            trainer(num_nodes, devices, strategy=strategy)


@pytest.mark.parametrize(
    ("start", "num_nodes", "devices", "variables"),
    [
        ("fits", 2, 1, {}),
        ("no job", 2, 1, {"MASTER_ADDR": "node1"}),
        ("script on one node", 1, 2, {}),  # Lightning starts the processes of this node
        ("bash on one node", 1, 2, {"SLURM_PTY_PORT": "40000"}),  # `srun --pty bash`, and then the command
        ("bash on one node", 1, 4, {}),  # each task is a run of its own
        ("bash", 2, 1, {"NODE_RANK": "1", "MASTER_ADDR": "node1"}),  # somebody else numbers the nodes
        ("shell", 2, 1, {"MASTER_PORT": "29500", "MASTER_ADDR": "node1"}),
    ],
)
def test_what_may_be_meant_is_not_refused(become, monkeypatch, start, num_nodes, devices, variables):
    become(start)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    trainer(num_nodes, devices)


def test_a_job_has_the_port_of_its_step_unless_the_user_has_chosen_one(become, monkeypatch):
    become("fits")
    ours, lightnings = CheckedSLURMEnvironment(), SLURMEnvironment()
    for number, port in (("0", 15000), ("1", 15037)):
        monkeypatch.setenv("SLURM_STEP_ID", number)
        monkeypatch.setenv("SLURM_JOB_ID", "0")
        assert [rendezvous_port(environment) for environment in (ours, lightnings)] == [port, port]
        monkeypatch.delenv("MASTER_PORT")  # Lightning puts its port there
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert [rendezvous_port(environment) for environment in (ours, lightnings)] == [29500, 29500]

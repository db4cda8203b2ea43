"""Tasks of SLURM and their GPUs, as a strategy and Lightning's launcher ask about them; without SLURM."""

import os

import pytest
from lightning.pytorch import Trainer

from lightning_ddp_ext import CheckedSLURMEnvironment, ClusterError
from tests.clusters.test_slurm_arithmetic import srun


@pytest.fixture(autouse=True)
def _task_with_a_gpu(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM", "MASTER_"))]:
        monkeypatch.delenv(name)
    task = srun(2, 2, nodes=1, SLURM_GPUS_PER_TASK="1", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    for name, value in {**task, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)


def test_a_gpu_of_each_task_does_not_matter_to_a_run_on_the_cpu_also_when_it_starts():
    environment = CheckedSLURMEnvironment()
    Trainer(strategy="ddp_join", accelerator="cpu", devices=2, plugins=[environment], logger=False)
    environment.validate_settings(2, 1)  # as Lightning's launcher does
    environment.uses_gpus = True
    with pytest.raises(ClusterError, match="`SLURM_GPUS_PER_TASK=1` shows each task 1 GPU"):
        environment.validate_settings(2, 1)


def test_gpus_of_tasks_matter_where_nobody_has_said_what_the_devices_are():
    with pytest.raises(ClusterError, match="`SLURM_GPUS_PER_TASK=1` shows each task 1 GPU"):
        CheckedSLURMEnvironment().validate_settings(2, 1)

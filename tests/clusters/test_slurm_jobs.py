"""The examples as jobs of a real SLURM with two nodes."""

import csv
import shutil
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from lightning_ddp_ext.clusters.slurm import candidate_ports

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "slurm"
pytestmark = pytest.mark.timeout(900)
LIMIT = 300.0  # seconds for a job of seconds, on a busy machine
SMALL = [
    "trainer.max_epochs=1", "trainer.limit_train_batches=8", "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=2", "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false", "plot=false",
]  # fmt: skip


def test_a_job_trains_on_two_nodes_although_its_port_is_taken(slurm, tmp_path):
    job = slurm.submit("--hold", EXAMPLES / "train.sbatch", *SMALL, cwd=tmp_path)
    first, second, *_ = candidate_ports({"SLURM_JOB_ID": job})
    other = dist.TCPStore("127.0.0.1", first, is_master=True, wait_for_workers=False)
    slurm.call("scontrol", "release", job)
    state = slurm.wait(job, LIMIT)
    printed = slurm.output(job)
    assert state == "COMPLETED", printed
    assert f"port {first} of node " in printed
    assert f"the ranks meet at port {second}" in printed
    assert other.num_keys() <= 1  # nobody has left anything there
    assert printed.count("2 processes on cpu") == 1
    assert printed.count("optimizer steps") == 1
    assert "srun" not in printed
    (folder,) = tmp_path.glob("runs/*/*/*")
    assert folder == tmp_path / "runs" / "slurm" / job / "0"
    assert {path.name for path in folder.iterdir()} == {
        ".hydra", "checkpoints", "config.yaml", "hparams.yaml", "metrics.csv", "train.log", "train_rank_1.log"
    }  # fmt: skip
    config = OmegaConf.load(folder / "config.yaml")
    assert (config.trainer.num_nodes, config.trainer.devices, config.cluster.num_nodes) == (2, 1, 2)


@pytest.mark.slow
def test_a_job_fails_soon_when_a_task_is_killed(slurm, tmp_path):
    job = slurm.submit(EXAMPLES / "train.sbatch", *SMALL[1:], "trainer.max_epochs=100000", cwd=tmp_path)
    slurm.await_output(job, "run folder", LIMIT)
    task = slurm.task(job, 1)
    began = time.monotonic()
    task.kill()
    state = slurm.wait(job, LIMIT)
    assert state == "FAILED"
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_requeued_job_goes_on_in_its_own_folder(slurm, tmp_path):
    shutil.copy(ROOT / "tests" / "clusters" / "interrupting.py", tmp_path)
    added = "+callbacks.requeue._target_=interrupting.SignalOnce"
    job = slurm.submit(EXAMPLES / "requeue.sbatch", *SMALL, added, cwd=tmp_path)
    state = slurm.wait(job, 2 * LIMIT)
    printed = slurm.output(job)
    assert state == "COMPLETED", printed
    assert slurm.show(job)["Restarts"] == "1"
    (folder,) = tmp_path.glob("runs/*/*/*")
    assert folder == tmp_path / "runs" / "slurm" / job / "0"
    assert f"Restored all states from the checkpoint at {folder}/hpc_ckpt_1.ckpt" in printed
    assert printed.count("Restored all states") == 1
    assert "Loaded model weights" not in printed  # the test is of what was trained since
    before, after = (steps(folder / name) for name in ("metrics-1.csv", "metrics.csv"))
    assert before
    assert before[0] == 0
    assert 0 < before[-1] < after[0]
    assert after[-1] == 7


def steps(path):
    with path.open(newline="") as file:
        return sorted({int(row["step"]) for row in csv.DictReader(file) if row["train_loss_step"]})


@pytest.mark.slow
def test_a_strategy_of_one_process_refuses_several_tasks(slurm, tmp_path):
    done = slurm.call(
        "srun", "--nodes=1", "--ntasks-per-node=2", "lightning-ddp-ext", "cluster=slurm", "strategy=single",
        cwd=tmp_path, limit=LIMIT, expected=None,
    )  # fmt: skip
    assert done.returncode == 1
    messages = [line for line in done.stderr.splitlines() if line.startswith("lightning-ddp-ext: ")]
    assert len(messages) == 2
    assert "`strategy=single` runs in one process, and a launcher has started `SLURM_STEP_NUM_TASKS=2`" in messages[0]

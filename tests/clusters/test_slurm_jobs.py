"""The examples as jobs of a real SLURM with two nodes, and sweeps that submitit gives to it."""

import csv
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "slurm"
pytestmark = pytest.mark.timeout(900)
LIMIT = 300.0  # seconds for a job of seconds, on a busy machine
SMALL = [
    "trainer.max_epochs=1", "trainer.limit_train_batches=8", "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=2", "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false", "plot=false",
]  # fmt: skip
SWEPT = [*SMALL, "trainer.limit_train_batches=2", "trainer.limit_test_batches=1"]


@pytest.fixture
def _submitit():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra `slurm`")


@pytest.mark.slow
def test_a_job_trains_on_two_nodes(slurm, tmp_path):
    job = slurm.submit(EXAMPLES / "train.sbatch", *SMALL, cwd=tmp_path)
    state = slurm.wait(job, LIMIT)
    printed = slurm.output(job)
    assert state == "COMPLETED", printed
    assert printed.count("2 processes on cpu") == 1
    assert printed.count("optimizer steps") == 1
    assert "srun" not in printed
    (folder,) = tmp_path.glob("runs/*/*/*")
    assert folder == tmp_path / "runs" / "slurm" / job / "0"
    assert {path.name for path in folder.iterdir()} == {
        ".hydra", "checkpoints", "config.yaml", "hparams.yaml", "metrics.csv", "results.json",
        "train.log", "train_rank_1.log",
    }  # fmt: skip
    config = OmegaConf.load(folder / "config.yaml")
    assert (config.trainer.num_nodes, config.trainer.devices, config.cluster.num_nodes) == (2, 1, 2)


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


def printed(folder, ending):
    return {path.name: path.read_text() for path in folder.glob(f"runs/*/*/.submitit/*/*_log.{ending}")}


@pytest.mark.slow
@pytest.mark.usefixtures("_submitit")
def test_a_sweep_has_a_job_of_two_nodes_and_a_folder_for_each_configuration(slurm, tmp_path):
    (tmp_path / "conf").mkdir()  # is found by the command, and was there when the jobs were composed
    done = slurm.call(EXAMPLES / "sweep.sh", *SWEPT, cwd=tmp_path, limit=2 * LIMIT, expected=None)
    logs = printed(tmp_path, "out")
    assert done.returncode == 0, (done.stderr, logs, printed(tmp_path, "err"))
    assert len(logs) == 4  # two jobs of two tasks
    assert sum(text.count("2 processes on cpu") for text in logs.values()) == 2
    assert not any("srun" in text for text in printed(tmp_path, "err").values())
    configs = sorted(tmp_path.glob("runs/*/*/*/config.yaml"))
    assert [OmegaConf.load(path).model.learning_rate for path in configs] == [0.001, 0.002]
    for path in configs:
        assert {"metrics.csv", "checkpoints"} <= {other.name for other in path.parent.iterdir()}


@pytest.mark.slow
@pytest.mark.usefixtures("_submitit")
def test_a_job_that_cannot_start_is_named_where_the_sweep_was_started(slurm, tmp_path):
    done = slurm.call(
        "lightning-ddp-ext", "-m", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=5", "cluster=slurm",
        "strategy=ddp_join", "trainer.devices=2", *SWEPT, cwd=tmp_path, limit=2 * LIMIT, expected=None,
    )  # fmt: skip
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith(
        "lightning-ddp-ext: job 0 of the sweep, `cluster=slurm strategy=ddp_join trainer.devices=2 "
    )
    assert "`SLURM_NTASKS=1`" in message
    assert "rank 1 is missing" in message


@pytest.mark.slow
@pytest.mark.usefixtures("_submitit")
def test_a_job_that_gets_the_signal_of_submitit_goes_on_from_its_checkpoint(slurm, tmp_path):
    shutil.copy(ROOT / "tests" / "clusters" / "interrupting.py", tmp_path)
    added = ["+callbacks.requeue._target_=interrupting.SignalOnce", "+callbacks.requeue.name=SIGUSR2"]
    done = slurm.call(
        EXAMPLES / "sweep.sh", *SWEPT, "trainer.limit_train_batches=8", "trainer.log_every_n_steps=1", *added,
        "+callbacks.requeue.rank=0", cwd=tmp_path, limit=2 * LIMIT, expected=None,
    )  # fmt: skip
    errors = printed(tmp_path, "err")
    assert done.returncode == 0, (done.stderr, printed(tmp_path, "out"), errors)
    assert sum("Caught signal SIGUSR2" in text for text in printed(tmp_path, "out").values()) == 2
    for number in range(2):
        (folder,) = tmp_path.glob(f"runs/*/*/{number}")
        assert {"hpc_ckpt_1.ckpt", "metrics-1.csv", "metrics.csv"} <= {path.name for path in folder.iterdir()}
        assert sum(f"checkpoint at {folder}/hpc_ckpt_1.ckpt" in text for text in errors.values()) == 1

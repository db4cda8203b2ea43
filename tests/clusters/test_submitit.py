"""Sweeps that submitit gives to a real SLURM with two nodes."""

import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra `slurm`")

SWEEP = Path(__file__).parents[2] / "examples" / "slurm" / "sweep.sh"
pytestmark = pytest.mark.timeout(900)
LIMIT = 600.0  # seconds, on a busy machine
SMALL = [
    "trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1", "trainer.enable_progress_bar=false", "plot=false",
]  # fmt: skip


def printed(folder, ending):
    return {path.name: path.read_text() for path in folder.glob(f"runs/*/*/.submitit/*/*_log.{ending}")}


@pytest.mark.slow
def test_a_sweep_has_a_job_of_two_nodes_and_a_folder_for_each_configuration(slurm, tmp_path):
    (tmp_path / "conf").mkdir()  # is found by the command, and was there when the jobs were composed
    done = slurm.call(SWEEP, *SMALL, cwd=tmp_path, limit=LIMIT, expected=None)
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
def test_a_job_that_cannot_start_is_named_where_the_sweep_was_started(slurm, tmp_path):
    done = slurm.call(
        "lightning-ddp-ext", "-m", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=5", "cluster=slurm",
        "strategy=ddp_join", "trainer.devices=2", *SMALL, cwd=tmp_path, limit=LIMIT, expected=None,
    )  # fmt: skip
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith(
        "lightning-ddp-ext: job 0 of the sweep, `cluster=slurm strategy=ddp_join trainer.devices=2 "
    )
    assert "`SLURM_NTASKS=1`" in message
    assert "rank 1 is missing" in message


@pytest.mark.slow
def test_a_job_that_gets_the_signal_of_submitit_goes_on_from_its_checkpoint(slurm, tmp_path):
    shutil.copy(Path(__file__).parent / "interrupting.py", tmp_path)
    added = ["+callbacks.requeue._target_=interrupting.SignalOnce", "+callbacks.requeue.name=SIGUSR2"]
    done = slurm.call(
        SWEEP, *SMALL, "trainer.limit_train_batches=8", "trainer.log_every_n_steps=1", *added,
        "+callbacks.requeue.rank=0", cwd=tmp_path, limit=LIMIT, expected=None,
    )  # fmt: skip
    errors = printed(tmp_path, "err")
    assert done.returncode == 0, (done.stderr, printed(tmp_path, "out"), errors)
    assert sum("Caught signal SIGUSR2" in text for text in printed(tmp_path, "out").values()) == 2
    for number in range(2):
        (folder,) = tmp_path.glob(f"runs/*/*/{number}")
        assert {"hpc_ckpt_1.ckpt", "metrics-1.csv", "metrics.csv"} <= {path.name for path in folder.iterdir()}
        assert sum(f"checkpoint at {folder}/hpc_ckpt_1.ckpt" in text for text in errors.values()) == 1

"""Sweeps that submitit gives to a real SLURM with two nodes."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from omegaconf import OmegaConf

from lightning_ddp_ext.resume.preemption import REQUEUE, PreemptionHandler

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra `slurm`")
submitit = pytest.importorskip("submitit")
SlurmJobEnvironment = pytest.importorskip("submitit.slurm.slurm").SlurmJobEnvironment

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


class Job:
    """What submitit calls again after a requeue."""

    def __call__(self):
        pass

    def checkpoint(self):
        return submitit.helpers.DelayedSubmission(self)


@pytest.fixture
def task(monkeypatch, tmp_path):
    """Make this process a task of submitit's, with its signal handlers; it tells what is done about a signal."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "MASTER_"))]:
        monkeypatch.delenv(name)
    variables = {"JOB_ID": "7", "JOB_NAME": "sweep", "NNODES": "1", "NTASKS": "1", "NTASKS_PER_NODE": "1"}
    for name, value in {**variables, "STEP_ID": "0", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    done = []
    monkeypatch.setattr(SlurmJobEnvironment, "_requeue", lambda *_: done.append("requeued"))
    numbers = (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    delayed = submitit.helpers.DelayedSubmission(Job())
    delayed.set_timeout(30, 3)
    SlurmJobEnvironment()._handle_signals(submitit.core.utils.JobPaths(tmp_path, job_id="7", task_id=0), delayed)
    yield done
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_signal_of_submitit_saves_a_checkpoint_before_submitit_requeues_the_job(task, monkeypatch):
    assert f"cluster.requeue_signal={SlurmJobEnvironment._usr_sig().name}" in SWEEP.read_text()
    with initialize_config_module("lightning_ddp_ext.conf", version_base="1.3"):
        config = compose("train", ["cluster=slurm", "cluster.requeue_signal=SIGUSR2", "cluster.num_nodes=1"])
    trainer = Trainer(
        strategy="ddp_join", accelerator="cpu", devices=1, plugins=[instantiate(config.cluster)], logger=False
    )  # fmt: skip
    monkeypatch.setattr(trainer, "save_checkpoint", lambda *args, **kwargs: task.append("saved"))
    monkeypatch.setattr(trainer.strategy, "barrier", lambda name: task.append("waited for"))
    preemption = PreemptionHandler(trainer)
    trainer._signal_connector.register_signal_handlers()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert (preemption.request, task) == (REQUEUE, [])
    preemption.agree(preemption.request)
    with pytest.raises(SystemExit):
        preemption.stop_if_agreed()
    assert task == ["saved", "requeued", "waited for"]

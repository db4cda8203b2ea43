"""A signal makes all ranks end after the same batch; in one process, two handlers stand for two ranks."""

import os
import signal
import subprocess
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_ddp_ext.reducer.control import ControlField
from lightning_ddp_ext.resume import preemption
from lightning_ddp_ext.resume.preemption import REQUEUE, STOP, PreemptionHandler, exit_on_sigterm, requeue_job


@pytest.fixture(autouse=True)
def _signals_restored():
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Rank:
    """A rank of a run, with a record of its actions."""

    def __init__(self, tmp_path, environment=None):
        plugins = [] if environment is None else [environment]
        self.trainer = Trainer(
            strategy="ddp_join", accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path, plugins=plugins
        )
        self.done = []
        self.trainer.save_checkpoint = lambda path, **_: self.done.append(f"saved {os.path.basename(path)}")
        self.trainer.strategy.barrier = lambda name=None: self.done.append("waited")
        self.requests = ControlField()
        self.handler = PreemptionHandler(ExitStack(), self.trainer, self.requests)
        self.trainer._signal_connector.register_signal_handlers()

    def end_step(self, request):
        """Return the exit code if the rank ends after a step whose largest request this is."""
        try:
            self.handler.stop(request)
        except SystemExit as end:
            return end.code
        return None


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_ranks_end_after_the_same_step_with_one_code_whichever_rank_got_the_signal(tmp_path, signum, code):
    first = Rank(tmp_path)
    os.kill(os.getpid(), signum)
    ranks = [first, Rank(tmp_path)]
    assert [bool(rank.requests.value) for rank in ranks] == [True, False]
    assert [rank.done for rank in ranks] == [[], []]  # the signal only sets a flag
    agreed = max(rank.requests.value for rank in ranks)
    assert [rank.end_step(agreed) for rank in ranks] == [code, code]
    assert [rank.done[0] for rank in ranks] == ["saved hpc_ckpt_1.ckpt"] * 2


def test_another_handler_of_sigterm_is_called_at_once_and_one_of_the_requeueing_signal_after_saving(tmp_path):
    calls = []
    signal.signal(signal.SIGTERM, lambda *_: calls.append("terminated"))
    signal.signal(signal.SIGUSR1, lambda *_: rank.done.append("requeued"))
    rank = Rank(tmp_path)
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR1):
        os.kill(os.getpid(), signum)
    assert (calls, rank.done) == (["terminated"], [])
    assert rank.requests.value == REQUEUE > STOP
    assert rank.end_step(REQUEUE) == 138
    assert rank.done == ["saved hpc_ckpt_1.ckpt", "requeued", "waited"]


@pytest.mark.parametrize("auto_requeue", [True, False])
def test_slurm_requeues_the_job_after_its_signal_if_its_environment_allows_it(tmp_path, monkeypatch, auto_requeue):
    names = {"NTASKS": 1, "JOB_ID": 7, "JOB_NAME": "a", "PROCID": 0, "LOCALID": 0, "NODEID": 0}
    for name, value in names.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    rank = Rank(tmp_path, SLURMEnvironment(auto_requeue, signal.SIGUSR2))
    monkeypatch.setattr(
        preemption, "requeue_job", lambda environ: rank.done.append(f"requeued {environ['SLURM_JOB_ID']}")
    )
    os.kill(os.getpid(), signal.SIGUSR2)
    assert rank.end_step(rank.requests.value) == 128 + signal.SIGUSR2
    assert rank.done == ["saved hpc_ckpt_1.ckpt", *(["requeued 7"] if auto_requeue else []), "waited"]


def test_a_job_is_requeued_by_its_number_or_warned_of(monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command[-1])
        assert command[:-1] == ["scontrol", "requeue"]
        return subprocess.CompletedProcess(command, int(command[-1] == "8"), "", "denied\n")

    monkeypatch.setattr(subprocess, "run", run)
    requeue_job({"SLURM_JOB_ID": "7"})
    requeue_job({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"})
    with pytest.warns(UserWarning, match="Job 8 was not requeued: denied. Submit it with `sbatch --requeue`"):
        requeue_job({"SLURM_JOB_ID": "8"})
    assert commands == ["7", "5_2", "8"]


def test_without_a_checkpoint_to_save_sigterm_ends_the_process_and_its_children(monkeypatch):
    trainer = Trainer(strategy="ddp_join", accelerator="cpu", devices=1, logger=False)
    killed = []
    monkeypatch.setattr(trainer.strategy, "_launcher", SimpleNamespace(kill=killed.append))
    exit_on_sigterm(ExitStack(), trainer)
    trainer._signal_connector.register_signal_handlers()
    with pytest.raises(SystemExit) as end:
        os.kill(os.getpid(), signal.SIGTERM)
    assert (end.value.code, killed) == (143, [signal.SIGTERM])


def test_workers_are_shielded_once_and_keep_their_initialisation():
    loader = DataLoader([1, 2], num_workers=2, worker_init_fn=print)
    preemption.shield_workers(loader, 0, signal.SIGUSR1)
    shielded = loader.worker_init_fn
    assert shielded.initialize is print
    preemption.shield_workers(loader, 0, signal.SIGUSR1)
    assert loader.worker_init_fn is shielded
    without_workers = DataLoader([1, 2])
    preemption.shield_workers(without_workers, 0, signal.SIGUSR1)
    assert without_workers.worker_init_fn is None

"""Leaving a run together when a process is told to end, so that it can be resumed where it was."""

import atexit
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_ddp_ext._compat.loops import preemption_path, replace_signal_handling
from lightning_ddp_ext.reducer.control import StepControl

_SEEDS_WORKERS = "PL_SEED_WORKERS"  # what `seed_everything(workers=True)` leaves for Lightning


@dataclass(frozen=True)
class _Shielded:
    """Initialises a worker, in a process group of its own.

    torchrun, `timeout` and some schedulers signal whole groups. A worker that ends of that takes its rank along before
    the rank has saved. The rank itself can still end it.
    """

    initialize: Callable[[int], object] | None
    requeue_signal: signal.Signals

    def __call__(self, worker_id: int) -> None:
        os.setpgid(0, 0)
        signal.signal(self.requeue_signal, signal.SIG_IGN)
        if self.initialize is not None:
            self.initialize(worker_id)


def shield_workers(loader: object, rank: int, requeue_signal: signal.Signals) -> None:
    """Let the workers of a loader go on when the processes of a run are told to end, until their rank ends them.

    Args:
        loader: What Lightning is about to use; nothing is done if it has no workers.
        rank: This rank, for the seeds that Lightning gives workers that have no `worker_init_fn`.
        requeue_signal: The signal after which a job is requeued.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers or isinstance(loader.worker_init_fn, _Shielded):
        return
    initialize = loader.worker_init_fn
    if initialize is None and int(os.environ.get(_SEEDS_WORKERS, 0)):
        initialize = partial(pl_worker_init_function, rank=rank)
    loader.worker_init_fn = _Shielded(initialize, requeue_signal)


STOP, REQUEUE = 1, 2

_ENDING = 10.0  # seconds that processes started by this one have to end after it
_SHELL = 128  # added to the number of a signal in the exit code of a process that ends because of it


class PreemptionHandler:
    """Lets all ranks leave training after the same batch, with one checkpoint, when any of them has been told to end.

    A signal only sets a flag, which travels with the next gradient synchronisation. All ranks leave after that batch,
    before the next is fetched: they save where Lightning looks for the checkpoint of a preempted run,
    `ckpt_path="hpc"`, and end with the exit code of the signal, 128 and its number. A requeueing signal (SIGUSR1, or
    what `SLURMEnvironment` says) also has SLURM requeue the job. If another package has a handler for that signal, such
    as submitit, it is called when the checkpoint has been saved.

    Lightning saves within the signal handler instead; where a signal interrupts a collective, that hangs.

    Args:
        trainer: The Trainer, while it fits and before it registers its signal handlers.
        control: Carries the request of this rank, `STOP` or `REQUEUE`, to all ranks.

    Attributes:
        requeue_signal: The signal after which a job is requeued.
    """

    def __init__(self, trainer: Trainer, control: StepControl) -> None:
        self._trainer = trainer
        self._control = control
        self.requeue_signal = _requeue_signal(trainer)
        self._postponed: list[Callable[[], Any]] = []
        replace_signal_handling(trainer, self._register)

    def stop_if_agreed(self) -> None:
        """Save and leave, if that has been agreed; to be called between two batches.

        Raises:
            SIGTERMException: To end the process.
        """
        request = 0 if self._control.exchanged is None else self._control.exchanged.stop
        if not request:
            return
        signum = signal.SIGTERM if request == STOP else self.requeue_signal
        trainer = self._trainer
        _let_children_end(trainer)
        path = preemption_path(trainer)
        trainer.save_checkpoint(path, weights_only=False)
        code = _SHELL + signum
        rank_zero_info(
            f"{signum.name} was received: all ranks leave after step {trainer.global_step}, exit code {code}. Saved"
            f' {path}; fitting with `ckpt_path="hpc"` and this `default_root_dir` goes on from there.'
        )
        if request == REQUEUE:
            self._requeue()
        raise SIGTERMException(code)

    def _requeue(self) -> None:
        try:
            if self._postponed:
                for handler in self._postponed:
                    handler()
            elif self._trainer.is_global_zero and _requeues(self._trainer):
                requeue_job(os.environ)
        finally:
            # A rank that ends earlier has `srun -K` end the step, and rank 0 with it.
            self._trainer.strategy.barrier("requeued")

    def _register(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers there only
        self._replace(signal.SIGTERM, STOP)
        self._replace(self.requeue_signal, REQUEUE)

    def _replace(self, signum: signal.Signals, request: int) -> None:
        previous = signal.getsignal(signum)

        def receive(received: int, frame: Any) -> None:
            self._control.stop = max(self._control.stop, request)
            if callable(previous):
                if request == STOP:
                    previous(received, frame)
                elif not self._postponed:
                    self._postponed.append(lambda: previous(received, None))

        signal.signal(signum, receive)


def exit_on_sigterm(trainer: Trainer) -> None:
    """End this process when it receives SIGTERM, in a run that has nothing to save.

    Lightning's handler communicates. Other ranks notice that this one has gone, and processes that it has started are
    told to end too.

    Args:
        trainer: The Trainer, before it registers its signal handlers, for anything but fitting.
    """

    def leave(signum: int, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)
        raise SIGTERMException(_SHELL + signum)

    def register() -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, leave)
            requeue = None if _slurm(trainer) is None else _requeue_signal(trainer)
            if requeue is not None and signal.getsignal(requeue) is signal.SIG_DFL:
                signal.signal(requeue, signal.SIG_IGN)  # it comes before the time limit; there is nothing to go on from

    replace_signal_handling(trainer, register)


def requeue_job(environ: Mapping[str, str]) -> bool:
    """Have SLURM requeue the job of this process.

    Args:
        environ: SLURM's variables.

    Returns:
        Whether it does; a warning says why not.
    """
    job = environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    try:
        result = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
        problem = result.stderr.strip() if result.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem is None:
        rank_zero_info(f"Job {job} is requeued.")
        return True
    rank_zero_warn(f"Job {job} was not requeued: {problem}. Submit it with `sbatch --requeue` so that it can be.")
    return False


def _requeues(trainer: Trainer) -> bool:
    environment = _slurm(trainer)
    return environment is not None and environment.auto_requeue


def _requeue_signal(trainer: Trainer) -> signal.Signals:
    environment = _slurm(trainer)
    own = None if environment is None else environment.requeue_signal
    return signal.SIGUSR1 if own is None else own


def _slurm(trainer: Trainer) -> SLURMEnvironment | None:
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return environment if isinstance(environment, SLURMEnvironment) else None


def _let_children_end(trainer: Trainer) -> None:
    """Let processes that this one has started end as it does itself: with an exit code that is not 0.

    Lightning watches them, takes that for a crash, and kills this process.
    """
    children: list[subprocess.Popen[bytes]] = getattr(trainer.strategy.launcher, "procs", [])
    for child in children:
        atexit.register(_wait, child)
    children.clear()  # the list that Lightning watches


def _wait(child: "subprocess.Popen[bytes]") -> None:
    try:
        child.wait(_ENDING)
    except subprocess.TimeoutExpired:
        child.kill()

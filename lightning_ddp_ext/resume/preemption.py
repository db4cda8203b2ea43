"""End a run on all ranks after a signal, with one checkpoint."""

import atexit
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from lightning_ddp_ext._compat.lightning_loops import preemption_path, replace_signal_handling
from lightning_ddp_ext._lightning import (
    SIGTERMException,
    SLURMEnvironment,
    Trainer,
    pl_worker_init_function,
    rank_zero_warn,
)
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext.reducer.control import ControlField

STOP, REQUEUE = 1, 2

_SEEDS_WORKERS = "PL_SEED_WORKERS"  # set by Lightning's `seed_everything(workers=True)`
_ENDING = 10.0  # seconds that child processes have to end after this one
_SHELL = 128  # added to the number of a signal in the exit code


@dataclass(frozen=True)
class _Shielded:
    """Initialises a worker in a separate process group of the operating system.

    torchrun, `timeout` and some schedulers signal whole groups, and a rank ends without a checkpoint if a worker does.
    """

    initialize: Callable[[int], object] | None
    requeue_signal: signal.Signals

    def __call__(self, worker_id: int) -> None:
        os.setpgid(0, 0)
        signal.signal(self.requeue_signal, signal.SIG_IGN)
        if self.initialize is not None:
            self.initialize(worker_id)


def shield_workers(loader: object, rank: int, requeue_signal: signal.Signals) -> None:
    """Keep the workers of a loader alive after a signal to the process group, until their rank ends them."""
    if not hasattr(os, "setpgid"):  # Windows signals no groups
        return
    if not isinstance(loader, DataLoader) or not loader.num_workers or isinstance(loader.worker_init_fn, _Shielded):
        return
    initialize = loader.worker_init_fn
    if initialize is None and int(os.environ.get(_SEEDS_WORKERS, 0)):
        initialize = partial(pl_worker_init_function, rank=rank)
    loader.worker_init_fn = _Shielded(initialize, requeue_signal)


class PreemptionHandler:
    """Ends training on all ranks after the same batch, with one checkpoint, when any rank receives a signal.

    The signal only sets a flag, which is sent with the next gradient synchronisation: saving within the handler, as
    Lightning does, hangs if the signal interrupts a collective. After the requeueing signal (SIGUSR1, or the one of
    `SLURMEnvironment`) SLURM requeues the job, or the handler of another package, such as submitit, is called.
    """

    def __init__(self, cleanup: ExitStack, trainer: Trainer, requests: ControlField) -> None:
        self._trainer = trainer
        self._requests = requests  # of all ranks; 0 for none
        self.requeue_signal = _requeue_signal(trainer)
        self._postponed: list[Callable[[], Any]] = []
        replace_signal_handling(cleanup, trainer, self._register)

    def stop(self, request: int) -> None:
        """Save and raise `SIGTERMException`, because a rank has asked all ranks to stop. Call between two batches."""
        signum = signal.SIGTERM if request == STOP else self.requeue_signal
        trainer = self._trainer
        _let_children_end(trainer)
        path = preemption_path(trainer)
        trainer.save_checkpoint(path, weights_only=False)
        code = _SHELL + signum
        rank_zero_info(
            f"{signum.name} was received: all ranks end after step {trainer.global_step}, exit code {code}. Saved"
            f' {path}; fit with `ckpt_path="hpc"` and this `default_root_dir` to resume.'
        )
        if request == REQUEUE:
            self._requeue()
        raise SIGTERMException(code)

    def _requeue(self) -> None:
        try:
            if self._postponed:
                for handler in self._postponed:
                    handler()
            elif self._trainer.is_global_zero:
                environment = _slurm(self._trainer)
                if environment is not None and environment.auto_requeue:
                    requeue_job(os.environ)
        finally:
            # If a rank ended earlier, `srun -K` would end rank 0 too.
            self._trainer.strategy.barrier("requeued")

    def _register(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows signal handlers in the main thread only
        for signum, request in {self.requeue_signal: REQUEUE, signal.SIGTERM: STOP}.items():
            self._replace(signum, request)

    def _replace(self, signum: signal.Signals, request: int) -> None:
        previous = signal.getsignal(signum)

        def receive(received: int, frame: Any) -> None:
            self._requests.value = max(self._requests.value, request)
            if callable(previous):
                if request == STOP:
                    previous(received, frame)
                elif not self._postponed:
                    self._postponed.append(lambda: previous(received, None))

        signal.signal(signum, receive)


def exit_on_sigterm(cleanup: ExitStack, trainer: Trainer) -> None:
    """End this process and its children on SIGTERM, in a run without a checkpoint to save.

    Lightning's own handler uses collectives, and would hang. Call before the Trainer registers its signal handlers.
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
                signal.signal(requeue, signal.SIG_IGN)  # it announces the time limit; there is nothing to save

    replace_signal_handling(cleanup, trainer, register)


def requeue_job(environ: Mapping[str, str]) -> None:
    """Requeue the SLURM job of this process, or warn if that fails."""
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
    else:
        rank_zero_warn(f"Job {job} was not requeued: {problem}. Submit it with `sbatch --requeue` so that it can be.")


def _requeue_signal(trainer: Trainer) -> signal.Signals:
    environment = _slurm(trainer)
    own = None if environment is None else environment.requeue_signal
    return getattr(signal, "SIGUSR1", signal.SIGTERM) if own is None else own  # Windows has no SIGUSR1


def _slurm(trainer: Trainer) -> SLURMEnvironment | None:
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return environment if isinstance(environment, SLURMEnvironment) else None


def _let_children_end(trainer: Trainer) -> None:
    """Let child processes end with the exit code of the signal, which Lightning would treat as a crash of the run."""
    children: list[subprocess.Popen[bytes]] = getattr(trainer.strategy.launcher, "procs", [])
    for child in children:
        atexit.register(_wait, child)
    children.clear()  # the list that Lightning watches


def _wait(child: "subprocess.Popen[bytes]") -> None:
    try:
        child.wait(_ENDING)
    except subprocess.TimeoutExpired:
        child.kill()

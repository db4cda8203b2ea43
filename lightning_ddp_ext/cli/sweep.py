"""Jobs of a sweep, `--multirun`: one configuration, one folder and, with several processes, one process group each."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig

from lightning_ddp_ext.cli.errors import LaunchError
from lightning_ddp_ext.cli.validation import find_launcher, has_process_group

_FORWARDED = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
_GRACE = 5.0  # seconds


def needs_processes_of_its_own(config: DictConfig) -> bool:
    """Tell whether a job has to run in new processes.

    Lightning starts the other processes of a host by repeating the command, which is the whole sweep; and the process
    group, signal handlers and variables of one job would be met by the next.

    Args:
        config: The composed configuration of a job of a sweep.

    Returns:
        Whether it has; not under submitit, which has started all processes of the job.
    """
    return has_process_group(config) and not _is_submitted()


def check_start(config: DictConfig) -> None:
    """Refuse a sweep that several processes run at the same time.

    Args:
        config: The composed configuration of a job of a sweep.

    Raises:
        LaunchError: If a launcher has started this process several times.
    """
    variable = find_launcher()
    if variable is not None and not _is_submitted():
        tasks = os.environ[variable]
        raise LaunchError(
            f"`--multirun` was started {tasks} times (`{variable}={tasks}`), and each would run all jobs. Start it"
            " once, with `hydra/launcher=submitit_slurm` for jobs of several tasks."
        )


def run_in_own_processes() -> None:
    """Run a job of a sweep by a command of its own, as if it had been typed, and wait for it.

    Raises:
        LaunchError: If it ended with another exit code than 0; it has said why.
        SystemExit: If a signal was meant to end the sweep; the job has got it too.
    """
    hydra = HydraConfig.get()
    with _forwarding(subprocess.Popen(_command(), cwd=hydra.runtime.cwd)) as (process, received):
        code = process.wait()
    if received:
        raise SystemExit(128 + received[0])
    if code != 0:
        raise LaunchError(f"it ended with exit code {code}. Its messages are above, its folder is {_folder()}.")


def describe_job(problem: str) -> str:
    """Say which job of a sweep has a problem.

    Args:
        problem: The problem.

    Returns:
        Both.
    """
    hydra = HydraConfig.get()
    return f"job {hydra.job.num} of the sweep, `{' '.join(hydra.overrides.task)}`: {problem}"


def _command() -> list[str]:
    """Compose the command line of this job alone."""
    hydra = HydraConfig.get()
    folders = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    settings = [override for override in hydra.overrides.hydra if not override.startswith("hydra.mode=")]
    return [
        *(sys.executable, "-m", "lightning_ddp_ext"),
        *(f"--config-dir={folder}" for folder in folders),
        f"--config-name={hydra.job.config_name}",
        *hydra.overrides.task,
        *settings,
        f"hydra.run.dir={_quoted(_folder())}",
        "hydra.output_subdir=null",  # the sweep has written what it says there
        f"hydra.job.num={hydra.job.num}",
        f"hydra.job.id={_quoted(str(hydra.job.id))}",
    ]


def _folder() -> str:
    return str(HydraConfig.get().runtime.output_dir)


def _quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


def _is_submitted() -> bool:
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm"


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Pass signals on to a process while it runs; end it if this one is interrupted."""
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        process.send_signal(signum)

    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield process, received
    except KeyboardInterrupt:
        _end(process)
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_GRACE)  # a terminal interrupts all of its processes
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()

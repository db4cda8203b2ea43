"""The command: the search path of the configuration, the jobs of a sweep, and one message per error."""

import errno
import importlib
import logging
import os
import shutil
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from lightning_ddp_ext._import_names import NAMES, PACKAGE, choose, find_lightning
from lightning_ddp_ext.cli.settings import LaunchError, check_settings, describe
from lightning_ddp_ext.clusters.launchers import SRUN, find_launcher, in_sweep

_FULL_ERROR = "HYDRA_FULL_ERROR"

# Warnings of every run that no user can act on.
_UPSTREAM_WARNINGS = (
    r"Experiment logs directory .* exists and is not empty",  # Hydra has written its files there
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # lightning 2.6.6 on torch 2.13
    r"The `srun` command is available on your system but is not used",  # `cluster=slurm` checks it
    r".*there is no last checkpoint available",  # `LaunchSummary` gives a remedy
)


def main() -> None:
    """Run the command, which ends with one message and exit code 1 if the run cannot start.

    `HYDRA_FULL_ERROR=1` asks for the traceback. Classes and the folder `conf` of the working directory are found.
    """
    os.umask(os.umask(0o077) | 0o002)  # no file or folder that every user of the machine can write
    sys.path.insert(0, os.getcwd())
    try:
        find_lightning()
    except ModuleNotFoundError as error:
        _exit(error)
    if sys.argv[1:2] == ["doctor"]:
        _quieten()
        raise SystemExit(_import("cli.doctor").doctor(sys.argv[2:]))
    if sys.argv[1:2] == ["verify"]:
        _quieten()
        raise SystemExit(_import("cli.verify").main(sys.argv[2:]))
    if Path("conf").is_dir() and not any(argument.startswith(("--config-dir", "-cd")) for argument in sys.argv):
        # In front, because strategies append overrides to the arguments of the processes that they start.
        sys.argv.insert(1, "--config-dir=conf")
    rank = os.environ.get(SRUN.rank, "0")
    if rank != "0":  # only rank 0 of a SLURM step writes `.hydra`, and each rank a separate log
        sys.argv += ["hydra.output_subdir=null", f"hydra.job.name=train_rank_{rank}"]
    wants_traceback = os.environ.get(_FULL_ERROR)
    # Without this, Hydra prints errors of the configuration and exits. The run gets the user's setting back.
    os.environ[_FULL_ERROR] = "1"
    failed: list[LaunchError] = []

    @hydra.main(version_base="1.3", config_path="pkg://lightning_ddp_ext.conf", config_name="train")
    def application(config: DictConfig) -> float | None:
        os.environ[_FULL_ERROR] = wants_traceback or "0"
        _quieten()  # here, because submitit calls only this function in its processes
        try:
            return _train(config)
        except LaunchError as error:
            if wants_traceback == "1":
                raise
            if in_sweep():
                failed.append(_report_job(error))
                raise failed[-1] from None
            _remove_unused_folder()
            _exit(error.__cause__ or error)
        finally:
            if failed:
                # At its end, a sweep raises the error of the first failed job, which Hydra then passes to `main`.
                os.environ[_FULL_ERROR] = "1"

    try:
        application()
    except Exception as error:
        # Any error of Hydra and OmegaConf. Errors of the run do not arrive here: Hydra prints them and exits.
        if wants_traceback == "1":
            raise
        _exit(error)


def _import(name: str) -> Any:
    """Import a module of this package that needs Lightning; this one does not."""
    return importlib.import_module(f"{PACKAGE}.{name}")


def _train(config: DictConfig) -> float | None:
    """Train with the Lightning of the model, or start a job of a sweep; return the metric that a sweeper optimizes."""
    # Here, because its schemas need the sources of an installed Lightning, which `main` checks.
    from lightning_ddp_ext.conf.schemas import choose_lightning, use_lightning

    try:
        OmegaConf.resolve(config)
        OmegaConf.to_container(config, throw_on_missing=True)
        check_settings(config, HydraConfig.get())
        config.lightning = lightning = choose(choose_lightning(config))  # imports the model, and torch with it
    except Exception as error:
        # Any error of a setting, as in `cli/train.py`: the command prints one message.
        raise LaunchError(str(error)) from error
    use_lightning(lightning, config)
    try:
        if in_sweep() and os.environ.get("SUBMITIT_EXECUTOR") != "slurm":  # submitit starts all processes of a job
            return _train_in_sweep(config)
        return _import("cli.train").train(config)  # type: ignore[no-any-return]
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise LaunchError(str(error)) from error


def _train_in_sweep(config: DictConfig) -> float | None:
    """Run one job of a sweep, in a new process if its strategy starts processes by repeating the command."""
    variable = find_launcher()
    if variable is not None:
        tasks = os.environ[variable]
        raise LaunchError(
            f"`--multirun` was started {tasks} times (`{variable}={tasks}`), and each would run all jobs. Start it"
            " once, with `hydra/launcher=submitit_slurm` for jobs of several tasks."
        )
    if not _import("cli.validate").has_process_group(config):
        return _import("cli.train").train(config)  # type: ignore[no-any-return]
    hydra_config = HydraConfig.get()
    folder = str(hydra_config.runtime.output_dir)
    folders = [source.path for source in hydra_config.runtime.config_sources if source.provider == "command-line"]
    arguments = [
        *(f"--config-dir={path}" for path in folders),
        f"--config-name={hydra_config.job.config_name}",
        *hydra_config.overrides.task,
        *(override for override in hydra_config.overrides.hydra if not override.startswith("hydra.mode=")),
        f"hydra.run.dir={QuotedString(folder, Quote.single).with_quotes()}",
        "hydra.output_subdir=null",  # the sweep has written `.hydra` already
        f"hydra.job.num={hydra_config.job.num}",
        f"hydra.job.id={QuotedString(str(hydra_config.job.id), Quote.single).with_quotes()}",
    ]
    code = subprocess.call([sys.executable, "-m", "lightning_ddp_ext", *arguments], cwd=hydra_config.runtime.cwd)
    if code != 0:
        raise LaunchError(f"it ended with exit code {code}. Its messages are above, its folder is {folder}.")
    return _import("cli.train").read_metric(Path(folder), config.optimized_metric)  # type: ignore[no-any-return]


def _report_job(error: LaunchError) -> LaunchError:
    """Print which job of a sweep failed and why; the sweep continues with the next job."""
    hydra = HydraConfig.get()
    reason = describe(error.__cause__ or error)
    problem = f"job {hydra.job.num} of the sweep, `{' '.join(hydra.overrides.task)}`: {reason}"
    sys.stderr.write(f"lightning-ddp-ext: {problem}\n")
    return LaunchError(problem)


def _remove_unused_folder() -> None:
    """Remove the run folder of a refused run, and empty folders around it, if it holds nothing but Hydra's files."""
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    is_own = hydra.output_subdir is not None and not folder.samefile(os.curdir)
    if is_own and {path.name for path in folder.iterdir()} <= {hydra.output_subdir, f"{hydra.job.name}.log"}:
        with suppress(OSError):
            shutil.rmtree(folder)
            os.removedirs(os.path.relpath(folder.parent))


def _quieten() -> None:
    logging.raiseExceptions = False  # on a full disk, every message would add a traceback to the error of the run
    for message in _UPSTREAM_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for lightning in NAMES:
        # Lightning advertises another package at every start.
        logger = logging.getLogger(f"{lightning}.utilities.rank_zero")
        logger.addFilter(lambda record: "litlogger" not in record.getMessage())
        # As Lightning sets it up where Hydra has no handlers yet; otherwise two handlers would print each message.
        package = logging.getLogger(lightning)
        if not package.handlers:
            package.addHandler(logging.StreamHandler())
            package.propagate = False
        # The log of the run gets these messages as well. In a sweep, each job has another file.
        handlers = [one for one in package.handlers if not isinstance(one, logging.FileHandler)]
        package.handlers = handlers + [one for one in logging.getLogger().handlers if hasattr(one, "baseFilename")]


def _exit(error: BaseException) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.write(f"lightning-ddp-ext: {describe(error, sys.argv[1:])}\n")
    raise SystemExit(1)

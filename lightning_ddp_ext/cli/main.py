"""Entry point: where configuration is looked for, and how errors leave the process."""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import NoReturn

import hydra
from omegaconf import DictConfig

from lightning_ddp_ext.cli import sweep
from lightning_ddp_ext.cli.doctor import doctor
from lightning_ddp_ext.cli.errors import LaunchError, describe
from lightning_ddp_ext.cli.train import train
from lightning_ddp_ext.clusters.process_group_options import in_sweep

_FULL_ERROR = "HYDRA_FULL_ERROR"
_DOCTOR = "doctor"

# Warnings that every run would print and nobody can act on.
_UPSTREAM_WARNINGS = (
    r"Experiment logs directory .* exists and is not empty",  # the run folder already holds Hydra's files
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # lightning 2.6.6 on torch 2.13
    r"The `srun` command is available on your system but is not used",  # `cluster=slurm` knows when that is wrong
)


def main() -> None:
    """Run the command with the arguments of the process.

    The working directory is searched for people's own classes (`_target_`), and its folder `conf` for their
    configuration. With `doctor` as the first argument nothing is trained, see `cli.doctor`. An error before the run
    starts ends with one message and exit code 1; `HYDRA_FULL_ERROR=1` asks for the traceback.
    """
    _protect_files()
    sys.path.insert(0, os.getcwd())
    if sys.argv[1:2] == [_DOCTOR]:
        _quieten()
        raise SystemExit(doctor(sys.argv[2:]))
    if Path("conf").is_dir() and not any(argument.startswith(("--config-dir", "-cd")) for argument in sys.argv):
        # In front: processes that a strategy starts put overrides behind the arguments.
        sys.argv.insert(1, "--config-dir=conf")
    _leave_hydras_files_to_rank_0()
    wants_traceback = os.environ.get(_FULL_ERROR)
    # Hydra prints and exits by itself unless told to raise; the run then gets its own setting back.
    os.environ[_FULL_ERROR] = "1"
    failed: list[LaunchError] = []

    @hydra.main(version_base="1.3", config_path="pkg://lightning_ddp_ext.conf", config_name="train")
    def application(config: DictConfig) -> None:
        os.environ[_FULL_ERROR] = wants_traceback or "0"
        _quieten()  # here, as submitit calls nothing else in its processes
        try:
            _run(config)
        except LaunchError as error:
            if wants_traceback == "1":
                raise
            if in_sweep():
                failed.append(_fail_job(error))
                raise failed[-1] from None
            _exit(error.__cause__ or error)
        finally:
            if failed:
                # At its end a sweep raises the error of the first job that failed; Hydra lets it through to `main`.
                os.environ[_FULL_ERROR] = "1"

    try:
        application()
    except Exception as error:
        # Whatever Hydra and OmegaConf raise. The run itself is not meant here: Hydra prints its errors and exits.
        if wants_traceback == "1":
            raise
        _exit(error)


def _run(config: DictConfig) -> None:
    if not in_sweep():
        train(config)
        return
    sweep.check_start(config)
    if sweep.needs_processes_of_its_own(config):
        sweep.run_in_own_processes()
    else:
        train(config)


def _fail_job(error: LaunchError) -> LaunchError:
    """Say which job of a sweep failed and why; the sweep goes on with the next."""
    problem = sweep.describe_job(describe(error.__cause__ or error))
    sys.stderr.write(f"lightning-ddp-ext: {problem}\n")
    return LaunchError(problem)


def _leave_hydras_files_to_rank_0() -> None:
    """Let only rank 0 of a SLURM step write `.hydra`, and each rank a log of its own, as Lightning does on one host."""
    rank = os.environ.get("SLURM_PROCID", "0")
    if rank != "0":
        sys.argv += ["hydra.output_subdir=null", f"hydra.job.name=train_rank_{rank}"]


def _quieten() -> None:
    for message in _UPSTREAM_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advertisement)


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    # Lightning advertises another package at every start.
    return "litlogger" not in record.getMessage()


def _protect_files() -> None:
    """Leave no folder and no file behind that every user of the machine can write, whatever the umask."""
    os.umask(os.umask(0o077) | 0o002)


def _exit(error: BaseException) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.write(f"lightning-ddp-ext: {describe(error, sys.argv[1:])}\n")
    raise SystemExit(1)

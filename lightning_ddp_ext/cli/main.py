"""Entry point: where configuration is looked for, and how errors leave the process."""

import logging
import os
import sys
import warnings
from pathlib import Path

import hydra
from omegaconf import DictConfig

from lightning_ddp_ext.cli.doctor import doctor
from lightning_ddp_ext.cli.problems import LaunchError, describe
from lightning_ddp_ext.cli.train import train

_FULL_ERROR = "HYDRA_FULL_ERROR"
_DOCTOR = "doctor"

# Warnings that every run would print and nobody can act on.
_UPSTREAM_WARNINGS = (
    r"Experiment logs directory .* exists and is not empty",  # the run folder already holds Hydra's files
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # lightning 2.6.6 on torch 2.13
)


def main() -> None:
    """Run the command with the arguments of the process.

    The working directory is searched for people's own classes (`_target_`), and its folder `conf` for their
    configuration. With `doctor` as the first argument nothing is trained, see `cli.doctor`. An error before the run
    starts ends with one message and exit code 1; `HYDRA_FULL_ERROR=1` asks for the traceback.
    """
    _quieten()
    _protect_files()
    sys.path.insert(0, os.getcwd())
    if sys.argv[1:2] == [_DOCTOR]:
        raise SystemExit(doctor(sys.argv[2:]))
    if Path("conf").is_dir() and not any(argument.startswith(("--config-dir", "-cd")) for argument in sys.argv):
        # In front: processes that a strategy starts put overrides behind the arguments.
        sys.argv.insert(1, "--config-dir=conf")
    wants_traceback = os.environ.get(_FULL_ERROR)
    # Hydra prints and exits by itself unless told to raise; the run then gets its own setting back.
    os.environ[_FULL_ERROR] = "1"

    @hydra.main(version_base="1.3", config_path="pkg://lightning_ddp_ext.conf", config_name="train")
    def application(config: DictConfig) -> None:
        os.environ[_FULL_ERROR] = wants_traceback or "0"
        try:
            train(config)
        except LaunchError as error:
            if wants_traceback == "1":
                raise
            _exit(error.__cause__ or error)

    try:
        application()
    except Exception as error:
        # Whatever Hydra and OmegaConf raise. The run itself is not meant here: Hydra prints its errors and exits.
        if wants_traceback == "1":
            raise
        _exit(error)


def _quieten() -> None:
    for message in _UPSTREAM_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # Lightning advertises another package at every start.
    advertisement = "litlogger"
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: advertisement not in record.getMessage()
    )


def _protect_files() -> None:
    """Leave no folder and no file behind that every user of the machine can write, whatever the umask."""
    os.umask(os.umask(0o077) | 0o002)


def _exit(error: BaseException) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"lightning-ddp-ext: {describe(error, sys.argv[1:])}\n")
    raise SystemExit(1)

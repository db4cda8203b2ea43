"""`lightning-ddp-ext doctor`: what a run needs of hosts and networks, tried within seconds."""

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from omegaconf import DictConfig

from lightning_ddp_ext.cli.diagnosis import SETTINGS, SLURM, Diagnosis
from lightning_ddp_ext.cli.diagnosis_table import print_diagnosis
from lightning_ddp_ext.cli.examination import NetworkSettings, examine
from lightning_ddp_ext.cli.preflight import find_slurm_problems, has_process_group, is_started_alone
from lightning_ddp_ext.cli.preparation import check_run, make_plugins, prepare_config
from lightning_ddp_ext.cli.problems import LaunchError, describe
from lightning_ddp_ext.network.reports import Problem, report_here
from lightning_ddp_ext.network.slurm_arithmetic import summarize

# The default of training has one process, and no network to be checked.
_DEFAULT_STRATEGY, _CHECKED_STRATEGY = "balanced_dp", "strategy=ddp_checkpoint"
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_FAREWELL = 5.0  # seconds for local ranks to end


@dataclass(frozen=True, slots=True)
class _Options:
    overrides: tuple[str, ...]
    config_dir: str | None
    timeout: float
    json: bool


def doctor(arguments: Sequence[str]) -> int:
    """Run the command; rank 0 prints.

    Args:
        arguments: What follows `lightning-ddp-ext doctor`.

    Returns:
        The exit code: 0 if all is well, otherwise 1; another rank than 0 leaves it to rank 0 if that knows all.
    """
    options = _parse(arguments)
    # What Lightning says at every start.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    with _own_output() as output:
        diagnosis = _diagnose(options)
        if diagnosis.rank != 0:
            _complain(diagnosis)
        elif options.json:
            print(json.dumps(diagnosis.as_json(), indent=2), file=output, flush=True)
        else:
            print_diagnosis(diagnosis, output)
    return _exit_code(diagnosis)


def _parse(arguments: Sequence[str]) -> _Options:
    parser = argparse.ArgumentParser(
        prog="lightning-ddp-ext doctor",
        description="Checks hosts, networks and the launch of a training command, within seconds and without training:"
        " put `doctor` behind `lightning-ddp-ext` and leave the rest as it is, also under srun, torchrun or mpirun.",
        epilog="Ends with exit code 0 if all is well, and otherwise with 1 and what to do.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds to wait for missing ranks (%(default)g)")
    parser.add_argument("--config-dir", "-cd", help="a folder with your own configuration (conf, where there is one)")
    parser.add_argument("overrides", nargs="*", help="what the training command is given, such as strategy=ddp_join")
    found = parser.parse_intermixed_args(arguments)
    if not found.timeout > 0:
        parser.error(f"`--timeout` must be above 0 seconds, got {found.timeout:g}. Use 30, the default.")
    config_dir = found.config_dir or ("conf" if Path("conf").is_dir() else None)
    return _Options(tuple(found.overrides), config_dir, found.timeout, found.json)


@contextlib.contextmanager
def _own_output() -> Iterator[TextIO]:
    """Keep standard output for what this command prints; gloo and MPI write to it, too."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace") as output:
        os.dup2(2, 1)
        try:
            yield output
        finally:
            sys.stdout.flush()
            output.flush()
            os.dup2(output.fileno(), 1)


def _exit_code(diagnosis: Diagnosis) -> int:
    # Launchers end everybody when one rank fails, and rank 0 may not have printed yet what all know.
    return 0 if diagnosis.healthy or (diagnosis.rank != 0 and diagnosis.shared) else 1


def _complain(diagnosis: Diagnosis) -> None:
    """Say what rank 0 does not know."""
    if not diagnosis.healthy and not diagnosis.shared:
        sys.stderr.write(f"lightning-ddp-ext doctor: rank {diagnosis.rank}: {diagnosis.verdict}\n")
        sys.stderr.flush()


def _diagnose(options: _Options) -> Diagnosis:
    rank = next((int(os.environ[name]) for name in _RANKS if os.environ.get(name, "").isdecimal()), 0)
    diagnosis = Diagnosis(rank=rank, slurm=summarize(os.environ))
    try:
        _check(options, diagnosis)
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        # Whatever composing and constructors raise: it is what training would end with.
        diagnosis.add_problems([Problem(SETTINGS, describe(error))])
    if not diagnosis.reports:
        diagnosis.reports[diagnosis.rank] = report_here()
    return diagnosis


def _check(options: _Options, diagnosis: Diagnosis) -> None:
    config = _compose(options)
    choices = config.hydra.runtime.choices
    diagnosis.strategy = str(choices.strategy)
    prepare_config(config, choices)
    diagnosis.add_problems(Problem(SLURM, text) for text in find_slurm_problems(config))
    if not diagnosis.healthy:
        diagnosis.shared = True  # all tasks have the same variables
        return
    settings = _take_settings(config, options.timeout)
    plugins = make_plugins(config)
    trainer = _make_trainer(config, plugins)
    check_run(config, config.hydra, trainer, plugins)
    strategy = trainer.strategy
    if settings is None or not isinstance(strategy, DDPStrategy | FSDPStrategy):
        if trainer.world_size > 1:
            raise LaunchError(
                f"`strategy={choices.strategy}` makes a {type(strategy).__name__}, whose processes `doctor` does"
                " not know how to start. Use `strategy=ddp` to examine hosts and networks."
            )
        return
    environment = strategy.cluster_environment
    assert environment is not None  # the Trainer gives every strategy one
    diagnosis.environment = type(environment).__name__
    environment.validate_settings(strategy.num_processes, strategy.num_nodes)
    with _local_ranks(strategy, environment, options, diagnosis):
        examine(strategy, settings, diagnosis)


def _compose(options: _Options) -> DictConfig:
    # As `--config-dir` does it for training, in front of the packaged configuration.
    own = [] if options.config_dir is None else [f"hydra.searchpath=['file://{Path(options.config_dir).resolve()}']"]
    with initialize_config_module("lightning_ddp_ext.conf", version_base="1.3"):
        overrides = [*own, *options.overrides]
        config = compose("train", overrides, return_hydra_config=True)
        if _leaves_strategy_open(config, options.overrides):
            config = compose("train", [*overrides, _CHECKED_STRATEGY], return_hydra_config=True)
    return config


def _leaves_strategy_open(config: DictConfig, overrides: Sequence[str]) -> bool:
    """Tell whether nothing that was given chooses a strategy, or is meant for the one that training would use."""
    choices = config.hydra.runtime.choices
    if choices.strategy != _DEFAULT_STRATEGY or choices.get("experiment") is not None or is_started_alone():
        return False
    keys = [override.key_or_group for override in OverridesParser.create().parse_overrides(list(overrides))]
    return not any(key.partition(".")[0] == "strategy" for key in keys)


def _take_settings(config: DictConfig, timeout: float) -> NetworkSettings | None:
    """Take out of the strategy what may be wrong on this host alone: the others are to hear of it."""
    if not has_process_group(config):
        return None
    settings = NetworkSettings(
        backend=config.strategy.get("process_group_backend"),
        init_method=config.strategy.get("init_method"),
        network_interface=config.strategy.get("network_interface"),
        timeout=timedelta(seconds=timeout),
    )
    for key in {"process_group_backend", "network_interface"} & set(config.strategy):
        config.strategy[key] = None
    return settings


def _make_trainer(config: DictConfig, plugins: list[Any] | None) -> Trainer:
    trainer: Trainer = instantiate(
        config.trainer,
        _convert_="all",
        plugins=plugins,
        strategy=instantiate(config.strategy),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.getcwd(),
    )
    return trainer


@contextlib.contextmanager
def _local_ranks(
    strategy: DDPStrategy | FSDPStrategy, environment: ClusterEnvironment, options: _Options, diagnosis: Diagnosis
) -> Iterator[None]:
    """Start the other ranks of this host where training would start them."""
    if environment.creates_processes_externally:
        yield
        return
    # What Lightning's launcher sets. A fork has everything imported; CUDA does not survive one.
    variables = {
        "MASTER_ADDR": environment.main_address,
        "MASTER_PORT": str(environment.main_port),
        "NODE_RANK": str(environment.node_rank()),
        "WORLD_SIZE": str(strategy.num_nodes * strategy.num_processes),
    }
    forks = strategy.root_device.type == "cpu" and "fork" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    ranks = [
        context.Process(target=_run_local_rank, args=(options, {**variables, "LOCAL_RANK": str(rank)}), daemon=True)
        for rank in range(1, strategy.num_processes)
    ]
    for process in ranks:
        process.start()
    try:
        yield
    finally:
        # If they have not met, nobody waits for the others.
        deadline = time.monotonic() + (_FAREWELL if diagnosis.shared else 0)
        for process in ranks:
            process.join(max(0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _run_local_rank(options: _Options, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    diagnosis = _diagnose(options)
    _complain(diagnosis)
    raise SystemExit(_exit_code(diagnosis))

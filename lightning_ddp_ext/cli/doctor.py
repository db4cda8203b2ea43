"""The subcommand `doctor`: try what a run needs of nodes and networks, within seconds and without training."""

import argparse
import contextlib
import logging
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from lightning_ddp_ext._lightning import NAME, ClusterEnvironment, DDPStrategy, FSDPStrategy, PossibleUserWarning
from lightning_ddp_ext.cli.devices import DeviceSpeed, describe_devices, measure_device, time_call
from lightning_ddp_ext.cli.run_report import two_columns
from lightning_ddp_ext.cli.selftest import run_trials
from lightning_ddp_ext.cli.settings import LaunchError, check_settings, describe, instantiate
from lightning_ddp_ext.cli.validate import QUIET, check_run, make_trainer, prepare_config
from lightning_ddp_ext.clusters.environments import summarize
from lightning_ddp_ext.clusters.launchers import is_started_alone, launched_rank
from lightning_ddp_ext.clusters.process_group_options import Connection
from lightning_ddp_ext.conf.schemas import use_lightning
from lightning_ddp_ext.consistency import compare_setups
from lightning_ddp_ext.distributed.backends import limits_of_descriptors
from lightning_ddp_ext.distributed.exchange import destroy_group, gather_objects, list_ranks
from lightning_ddp_ext.distributed.network import ChosenNetwork, NodeNetwork, interface_addresses, node_name
from lightning_ddp_ext.distributed.rendezvous import RendezvousProgress
from lightning_ddp_ext.errors import (
    BackendError,
    ClusterError,
    NetworkInterfaceError,
    RendezvousError,
    ReplicaMismatchError,
)
from lightning_ddp_ext.strategies.gradient_options import describe_versions_of_run

# The failed step for each error; for all others it is the settings.
_STEPS: dict[type[Exception], str] = {
    BackendError: "backend",
    RendezvousError: "rendezvous",
    NetworkInterfaceError: "network",
    ReplicaMismatchError: "versions",
}

# The default strategy of training has one process, and no network to be checked.
_DEFAULT_STRATEGY, _CHECKED_STRATEGY = "balanced_dp", "strategy=ddp_checkpoint"
_FAREWELL = 5.0  # seconds for local ranks to end

SIZES = tuple(1024 * 16**power for power in range(5))  # 1 KiB to 64 MiB
_REPEATS = 9


class AllReduceTime(NamedTuple):
    """The time of one all-reduce of `size` bytes per rank."""

    size: int
    seconds: float

    def bandwidths(self, world_size: int) -> tuple[float, float]:
        """Return algorithm and bus bandwidth in bytes per second: size over time, and the least traffic of each rank.

        See https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
        """
        algorithm = self.size / self.seconds
        return algorithm, algorithm * 2 * (world_size - 1) / world_size


def measure_all_reduce(
    device: torch.device, *, sizes: Sequence[int] = SIZES, limit: float = 4.0
) -> list[AllReduceTime]:
    """Time all-reduces of ascending sizes in bytes until about `limit` seconds have passed, but the first in any case.

    Every rank returns the same times: the median of the slowest rank. A single rank returns none.
    """
    world_size = dist.get_world_size()
    measured: list[AllReduceTime] = []
    repeats, started = _REPEATS, time.perf_counter()
    for size, next_size in zip(sizes, (*sizes[1:], sizes[-1]), strict=True):
        if world_size == 1 or repeats < 1:
            break
        tensor = torch.zeros(size // torch.float32.itemsize, device=device)
        reduce = partial(dist.all_reduce, tensor)
        _, *times = [time_call(reduce, device) for _ in range(1 + repeats)]  # the first call warms up
        # The slowest rank decides for all, so that they stop after the same size.
        agreed = torch.tensor([statistics.median(times), time.perf_counter() - started], device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        seconds, spent = agreed.tolist()
        measured.append(AllReduceTime(size, seconds))
        repeats = min(_REPEATS, int((limit - spent) * size / (seconds * next_size)) - 1)
    return measured


@dataclass(kw_only=True, slots=True)
class Diagnosis:
    """Findings of one rank: the step that failed and its error, and whether rank 0 knows of the error."""

    rank: int
    slurm: str | None
    strategy: str = ""
    environment: str = ""
    world_size: int = 1
    num_nodes: int = 1
    progress: RendezvousProgress = field(default_factory=RendezvousProgress)
    network: ChosenNetwork | None = None
    devices: list[DeviceSpeed] = field(default_factory=list)  # of each rank, or of each replica
    all_reduce: list[AllReduceTime] = field(default_factory=list)
    trials: dict[str, str] = field(default_factory=dict)  # the result of each
    failed: str | None = None
    error: str = ""
    is_shared: bool = False

    @property
    def ranks(self) -> str:
        """The numbers of ranks and nodes as text."""
        plurals = ["" if count == 1 else "s" for count in (self.world_size, self.num_nodes)]
        return f"{self.world_size} rank{plurals[0]} on {self.num_nodes} node{plurals[1]}"

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if self.failed is not None:
            return f"Not healthy: {self.error}"
        if self.progress.backend is None:
            return f"Healthy: `strategy={self.strategy}` runs in one process and needs no network."
        if not self.all_reduce:
            return f"Healthy: {self.ranks}."
        largest = self.all_reduce[-1]
        spent, speed = time_text(largest.seconds), speed_text(largest.bandwidths(self.world_size)[1])
        return f"Healthy: {self.ranks} add up {size_text(largest.size)} in {spent} ({speed} per rank)."

    def rows(self) -> list[tuple[str, str]]:
        """Return the name and findings of each step in order; a step that was not tried has no findings."""
        settings = f"strategy={self.strategy}" if self.strategy else ""
        if self.environment:
            settings += f", {self.ranks}, known from {self.environment}"
        soft, hard = limits_of_descriptors()
        versions = (f"{name.removeprefix('version of ')} {own}" for name, own in describe_versions_of_run().items())
        this_node = NodeNetwork(
            node=node_name(), ranks=(self.rank,), interface=None, ports={}, available=interface_addresses()
        )
        return [
            ("settings", settings),
            ("SLURM", self.slurm or ""),
            ("nodes", "\n".join(map(_describe_node, self.progress.nodes or [this_node]))),
            ("backend", self.progress.backend or ""),
            ("rendezvous", self.progress.endpoint or ""),
            ("network", "" if self.network is None else str(self.network)),
            ("versions", ", ".join(versions)),
            # Rank 0 of `ddp_join` needs 6 a rank: for three process groups, and for as many connections to its store.
            ("open files", f"{soft}, raised to {hard} if needed: up to {hard // 6} ranks" if hard else ""),
            ("devices", describe_devices(self.devices, "replica" if self.progress.backend is None else "rank")),
            ("all-reduce", _list_times(self.all_reduce, self.world_size)),
            *self.trials.items(),
        ]


def size_text(size: int) -> str:
    """Return a number of bytes as text, such as "64 MiB"."""
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"


def time_text(seconds: float) -> str:
    """Return a time with three digits, such as "0.21 ms"."""
    return f"{_digits(1e3 * seconds)} ms" if seconds < 1 else f"{_digits(seconds)} s"


def speed_text(bandwidth: float) -> str:
    """Return bytes per second with three digits and powers of ten, such as "1.2 GB/s"."""
    return f"{_digits(bandwidth / 1e9)} GB/s" if bandwidth >= 1e9 else f"{_digits(bandwidth / 1e6)} MB/s"


def _digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):g}"  # 1000 rather than 1e+03


def _print(diagnosis: Diagnosis, file: TextIO) -> None:
    """Print a row for each step that was tried, and the verdict."""
    table = two_columns("Preflight")
    table.add_column(no_wrap=True)
    for step, found in diagnosis.rows():
        has_failed = step == diagnosis.failed
        if found or has_failed:
            # Texts, because brackets in names are no markup.
            table.add_row(step, Text(found), Text("failed", "bold red") if has_failed else Text("ok", "green"))
        if has_failed:
            break
    Console(file=file).print(table)
    print(diagnosis.verdict, file=file, flush=True)


def _describe_node(node: NodeNetwork) -> str:
    useful = {name: [a for a in found if "%" not in a] for name, found in node.available.items()}  # not link-local
    listed = "; ".join(f"{name} {', '.join(found)}".rstrip() for name, found in useful.items())
    reached = f", via {node.reached_over}" if node.reached_over else ""
    return f"{node.node} ({list_ranks(node.ranks)}{reached}): {listed}"


def _list_times(times: Sequence[AllReduceTime], world_size: int) -> str:
    rows = [("size", "time", "algorithm", "bus")] if times else []
    for one in times:
        algorithm, bus = map(speed_text, one.bandwidths(world_size))
        rows.append((size_text(one.size), time_text(one.seconds), algorithm, bus))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("   ".join(map(str.rjust, row, widths)) for row in rows)


def doctor(arguments: Sequence[str]) -> int:
    """Run the command on this rank, print on rank 0, and return the exit code: 0 if all is well, otherwise 1."""
    options = _parse(arguments)
    # Lightning's messages at every start.
    logging.getLogger(NAME).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    with _own_output() as output:
        diagnosis = diagnose(options)
        if diagnosis.rank == 0:
            _print(diagnosis, output)
            return int(diagnosis.failed is not None)
        return _finish_rank(diagnosis)


def _finish_rank(diagnosis: Diagnosis) -> int:
    """Write an error of another rank than 0 to standard error, unless rank 0 prints it; return the exit code."""
    # Launchers end all ranks when one fails, and rank 0 may not have printed the error yet.
    if diagnosis.failed is None or diagnosis.is_shared:
        return 0
    print(f"lightning-ddp-ext doctor: rank {diagnosis.rank}: {diagnosis.verdict}", file=sys.stderr, flush=True)
    return 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lightning-ddp-ext doctor",
        description="Checks nodes, networks and the launch of a training command, within seconds and without training:"
        " put `doctor` behind `lightning-ddp-ext` and leave the rest as it is, also under srun, torchrun or mpirun.",
        epilog="Ends with exit code 0 if all is well, and otherwise with 1 and a remedy.",
        allow_abbrev=False,
    )
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds to wait for missing ranks (%(default)g)")
    parser.add_argument(
        "--selftest", action="store_true", help="also train a small model with each strategy, and kill a rank"
    )
    parser.add_argument("--config-dir", "-cd", help="a folder with your own configuration (default: conf, if there)")
    parser.add_argument("overrides", nargs="*", help="overrides of the training command, such as strategy=ddp_join")
    options = parser.parse_intermixed_args(arguments)
    if not options.timeout > 0:
        parser.error(f"`--timeout` must be above 0 seconds, got {options.timeout:g}. Use 30, the default.")
    return options


@contextlib.contextmanager
def _own_output() -> Iterator[TextIO]:
    """Keep standard output for the table, since gloo and MPI write to it, too."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace") as output:
        os.dup2(2, 1)
        try:
            yield output
        finally:
            sys.stdout.flush()
            output.flush()
            os.dup2(output.fileno(), 1)


def diagnose(options: argparse.Namespace) -> Diagnosis:
    """Try all steps until one fails."""
    diagnosis = Diagnosis(rank=launched_rank(), slurm=summarize(os.environ))
    try:
        _check(options, diagnosis)
    except Exception as error:
        backend = diagnosis.progress.backend
        diagnosis.is_shared = diagnosis.progress.is_answered
        cause = error.__cause__ if isinstance(error, InstantiationException) else error
        if isinstance(cause, ClusterError) and diagnosis.slurm is not None:
            diagnosis.failed, diagnosis.error = "SLURM", str(cause)
            diagnosis.is_shared = True  # all tasks have the same variables
        elif type(error) in _STEPS:
            diagnosis.failed, diagnosis.error = _STEPS[type(error)], str(error)
        elif backend is not None and isinstance(error, RuntimeError):
            diagnosis.is_shared = False  # ranks may have different errors of the backend
            diagnosis.failed = "network" if diagnosis.network is None else "all-reduce"
            reason = str(error).partition("\n")[0]
            diagnosis.error = (
                f"the process group of `{backend}` failed on rank {diagnosis.rank}: {reason}."
                " Look for a rank that has ended, and for a firewall between the nodes."
            )
        elif os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        else:
            diagnosis.failed, diagnosis.error = "settings", describe(error)  # training would end with the same message
    return diagnosis


def _check(options: argparse.Namespace, diagnosis: Diagnosis) -> None:
    config = _compose(options)
    use_lightning(NAME, config)
    choices = config.hydra.runtime.choices
    diagnosis.strategy = str(choices.strategy)
    check_settings(config, config.hydra)
    prepare_config(config, choices)
    connection = _take_connection(config, options.timeout)
    trainer = make_trainer(config, instantiate(config.strategy), default_root_dir=os.getcwd(), **QUIET)
    check_run(config, config.hydra, trainer)
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy | FSDPStrategy):
        diagnosis.devices = [measure_device(one) for one in dict.fromkeys(getattr(strategy, "devices", ()))]
        if trainer.world_size > 1:
            raise LaunchError(
                f"`strategy={choices.strategy}` makes a {type(strategy).__name__}, whose processes `doctor` does"
                " not know how to start. Use `strategy=ddp` to check nodes and networks."
            )
        return
    environment = strategy.cluster_environment
    assert environment is not None and strategy.accelerator is not None  # noqa: PT018  the Trainer gives both
    diagnosis.environment = type(environment).__name__
    environment.validate_settings(strategy.num_processes, strategy.num_nodes)
    with _local_ranks(strategy, environment, options, diagnosis):
        strategy.set_world_ranks()
        diagnosis.rank, diagnosis.world_size = environment.global_rank(), environment.world_size()
        diagnosis.num_nodes = strategy.num_nodes
        try:
            strategy.accelerator.setup_device(strategy.root_device)
            diagnosis.network = connection.open(strategy, diagnosis.progress)
            compare_setups(describe_versions_of_run())
            diagnosis.devices = gather_objects(measure_device(strategy.root_device))
            diagnosis.all_reduce = measure_all_reduce(strategy.root_device)
            for name, result, problem in run_trials(strategy, connection) if options.selftest else ():
                diagnosis.trials[name] = "" if problem else result  # the verdict has the problem
                if problem:
                    diagnosis.failed, diagnosis.error, diagnosis.is_shared = name, problem, True
                    break
        finally:
            if dist.is_initialized():
                destroy_group()


def _compose(options: argparse.Namespace) -> DictConfig:
    """Compose the training configuration, with a strategy of several processes if no override is about the strategy."""
    folder = options.config_dir or ("conf" if Path("conf").is_dir() else None)
    # In front of the packaged configuration, as `--config-dir` of the training command is.
    own = [] if folder is None else [f"hydra.searchpath=['file://{Path(folder).resolve()}']"]
    with initialize_config_module("lightning_ddp_ext.conf", version_base="1.3"):
        overrides = [*own, *options.overrides]
        config = compose("train", overrides, return_hydra_config=True)
        choices = config.hydra.runtime.choices
        keys = [one.key_or_group for one in OverridesParser.create().parse_overrides(options.overrides)]
        is_chosen = any(key.partition(".")[0] == "strategy" for key in keys) or choices.get("experiment") is not None
        if choices.strategy == _DEFAULT_STRATEGY and not is_chosen and not is_started_alone():
            config = compose("train", [*overrides, _CHECKED_STRATEGY], return_hydra_config=True)
    return config


def _take_connection(config: DictConfig, timeout: float) -> Connection:
    """Move backend and interface out of the strategy, which would reject them on this rank alone."""
    connection = Connection(
        backend=config.strategy.get("process_group_backend"),
        init_method=config.strategy.get("init_method"),
        network_interface=config.strategy.get("network_interface"),
        timeout=timedelta(seconds=timeout),
    )
    for key in {"process_group_backend", "network_interface"} & set(config.strategy):
        config.strategy[key] = None
    return connection


@contextlib.contextmanager
def _local_ranks(
    strategy: DDPStrategy | FSDPStrategy,
    environment: ClusterEnvironment,
    options: argparse.Namespace,
    diagnosis: Diagnosis,
) -> Iterator[None]:
    """Start the other ranks of this node if training would start them."""
    if environment.creates_processes_externally:
        yield
        return
    # The variables of Lightning's launcher. A fork has everything imported; CUDA does not survive one.
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
        # Ranks that rank 0 has not heard of may wait for much longer.
        deadline = time.monotonic() + (_FAREWELL if diagnosis.progress.is_answered else 0)
        for process in ranks:
            process.join(max(0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _run_local_rank(options: argparse.Namespace, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    raise SystemExit(_finish_rank(diagnose(options)))

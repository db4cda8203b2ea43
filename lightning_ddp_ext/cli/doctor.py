"""The subcommand `doctor`."""

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from omegaconf import DictConfig
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_ddp_ext.cli.errors import LaunchError, describe
from lightning_ddp_ext.cli.validate import (
    check_run,
    find_slurm_problems,
    has_process_group,
    is_started_alone,
    make_plugins,
    prepare_config,
)
from lightning_ddp_ext.clusters.slurm import meeting_ports, step_name, summarize
from lightning_ddp_ext.distributed.backends import check_backend
from lightning_ddp_ext.distributed.bandwidth import AllReduceTime, measure_all_reduce
from lightning_ddp_ext.distributed.exchange import list_ranks
from lightning_ddp_ext.distributed.init_method import address_text
from lightning_ddp_ext.distributed.interfaces import check_gloos_variable, check_interface
from lightning_ddp_ext.distributed.network_choice import ChosenNetwork
from lightning_ddp_ext.distributed.process_group import init_process_group
from lightning_ddp_ext.distributed.rank_reports import (
    VERSIONS,
    ClockOffset,
    Problem,
    RankReport,
    exchange_reports,
    report_here,
)
from lightning_ddp_ext.distributed.rendezvous import RendezvousInfo
from lightning_ddp_ext.distributed.stores import OpenStore
from lightning_ddp_ext.errors import DDPExtError, NetworkInterfaceError

# What is looked at, in this order; `network.reports` adds "versions".
SETTINGS, SLURM, BACKEND, INTERFACES = "settings", "SLURM", "backend", "interfaces"
RENDEZVOUS, NETWORK, ALL_REDUCE = "rendezvous", "network", "all-reduce"


@dataclass(kw_only=True, slots=True)
class Diagnosis:
    """What one rank knows in the end; rank 0 knows what the others have said.

    Attributes:
        rank: This rank, as far as it is known.
        strategy: The name that the strategy was chosen by.
        environment: What has told the ranks, such as `SLURMEnvironment`.
        world_size: Number of ranks.
        num_nodes: Number of hosts.
        slurm: What SLURM has started; None outside of it.
        backend: The backend; None for one process.
        meeting_place: Where ranks meet.
        reports: What ranks say about themselves, by rank.
        clocks: How far clocks are ahead of rank 0's, by the first rank of their host.
        network: What hosts talk over.
        all_reduce: How long all-reduces took, by size.
        problems: What is wrong.
        shared: Whether rank 0 knows of the problems of this rank.
    """

    rank: int = 0
    strategy: str = ""
    environment: str = ""
    world_size: int = 1
    num_nodes: int = 1
    slurm: str | None = None
    backend: str | None = None
    meeting_place: str | None = None
    reports: dict[int, RankReport] = field(default_factory=dict)
    clocks: dict[int, ClockOffset] = field(default_factory=dict)
    network: ChosenNetwork | None = None
    all_reduce: list[AllReduceTime] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    shared: bool = False

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def verdict(self) -> str:
        """All of it in one line."""
        if self.problems:
            return f"Not healthy: {' Also: '.join(problem.text for problem in self.problems)}"
        if self.backend is None:
            return f"Healthy: `strategy={self.strategy}` runs in one process and needs no network."
        hosts = _plural(len(self.hosts()), "host")
        if not self.all_reduce:
            return f"Healthy: {_plural(self.world_size, 'rank')} on {hosts}."
        largest = self.all_reduce[-1]
        return (
            f"Healthy: {_plural(self.world_size, 'rank')} on {hosts} add up {size_text(largest.size)} in"
            f" {time_text(largest.seconds)} ({speed_text(largest.bus_bandwidth)} per rank)."
        )

    def add_problems(self, problems: Iterable[Problem]) -> None:
        """Take over problems, each text once: ranks of a host say the same.

        Args:
            problems: What is wrong.
        """
        known = {problem.text for problem in self.problems}
        for problem in problems:
            if problem.text not in known:
                known.add(problem.text)
                self.problems.append(problem)

    def hosts(self) -> list[tuple[list[int], RankReport]]:
        """List hosts in the order of their ranks.

        Returns:
            The ranks of each host, and the report of the first.
        """
        by_machine: dict[str, list[int]] = {}
        for rank in sorted(self.reports):
            by_machine.setdefault(self.reports[rank].machine, []).append(rank)
        return [(ranks, self.reports[ranks[0]]) for ranks in by_machine.values()]

    def as_json(self) -> dict[str, Any]:
        """Return everything in what JSON can hold: times in seconds, sizes in bytes, bandwidths in bytes per second."""
        return {
            "healthy": self.healthy,
            "verdict": self.verdict,
            "problems": [{"check": problem.check, "text": problem.text} for problem in self.problems],
            "strategy": self.strategy,
            "environment": self.environment,
            "world_size": self.world_size,
            "num_nodes": self.num_nodes,
            "slurm": self.slurm,
            "backend": self.backend,
            "meeting_place": self.meeting_place,
            "network": None if self.network is None else str(self.network),
            "hosts": [self._host_as_json(ranks, report) for ranks, report in self.hosts()],
            "all_reduce": [
                {
                    "size": row.size,
                    "seconds": row.seconds,
                    "algorithm_bandwidth": row.algorithm_bandwidth,
                    "bus_bandwidth": row.bus_bandwidth,
                }
                for row in self.all_reduce
            ],
        }

    def _host_as_json(self, ranks: list[int], report: RankReport) -> dict[str, Any]:
        clock = self.clocks.get(ranks[0])
        return {
            "host": report.host,
            "ranks": ranks,
            "interfaces": {name: list(addresses) for name, addresses in report.interfaces.items()},
            "rendezvous_address": report.rendezvous_address,
            "rendezvous_interface": report.rendezvous_interface,
            "backends": list(report.backends),
            "versions": dict(report.versions),
            "clock_offset": None if clock is None else clock.seconds,
            "clock_uncertainty": None if clock is None else clock.uncertainty,
        }


def size_text(size: int) -> str:
    """Write a size for people.

    Args:
        size: A number of bytes.

    Returns:
        Such as `"64 MiB"`.
    """
    for unit, bytes_of in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_of:
            return f"{size / bytes_of:g} {unit}"
    return f"{size} B"


def time_text(seconds: float) -> str:
    """Write a time for people.

    Args:
        seconds: A time in seconds.

    Returns:
        Such as `"0.21 ms"`, with three digits.
    """
    return f"{_digits(1e3 * seconds)} ms" if seconds < 1 else f"{_digits(seconds)} s"


def speed_text(bandwidth: float) -> str:
    """Write a bandwidth for people.

    Args:
        bandwidth: Bytes per second.

    Returns:
        Such as `"1.2 GB/s"`, with three digits and powers of ten.
    """
    return f"{_digits(bandwidth / 1e9)} GB/s" if bandwidth >= 1e9 else f"{_digits(bandwidth / 1e6)} MB/s"


def _digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):g}"  # 1000 rather than 1e+03


def _plural(count: int, one: str) -> str:
    return f"{count} {one}{'' if count == 1 else 's'}"


_CLOCKS = "clocks"
_NOTABLE_SKEW = 1.0  # seconds; nothing depends on it but the order of lines in logs and of files


def print_diagnosis(diagnosis: Diagnosis, file: TextIO) -> None:
    """Print a table and the verdict.

    Args:
        diagnosis: What was found.
        file: Where to.
    """
    table = Table(title="Preflight", title_justify="left", show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    failed = {problem.check for problem in diagnosis.problems}
    for check, found in _rows(diagnosis):
        if found or check in failed:
            table.add_row(check, _as_cell(found), _state(check, failed, diagnosis))
    Console(file=file).print(table)
    print(diagnosis.verdict, file=file, flush=True)


def _rows(diagnosis: Diagnosis) -> list[tuple[str, str | RenderableType]]:
    hosts = diagnosis.hosts()
    return [
        (SETTINGS, _settings(diagnosis)),
        (SLURM, diagnosis.slurm or ""),
        (BACKEND, _backends(diagnosis, [report for _, report in hosts])),
        (INTERFACES, "\n".join(_interfaces(ranks, report) for ranks, report in hosts)),
        (VERSIONS, "\n".join(_differing([_versions(report) for _, report in hosts]))),
        (RENDEZVOUS, _rendezvous(diagnosis, [report for _, report in hosts])),
        (_CLOCKS, "\n".join(_clocks(diagnosis))),
        (NETWORK, "" if diagnosis.network is None else str(diagnosis.network)),
        (ALL_REDUCE, _times(diagnosis.all_reduce) if diagnosis.all_reduce else ""),
    ]


def _as_cell(found: str | RenderableType) -> RenderableType:
    return Text(found) if isinstance(found, str) else found  # brackets of names are no markup


def _state(check: str, failed: set[str], diagnosis: Diagnosis) -> Text:
    if check in failed:
        return Text("failed", style="bold red")
    if check == _CLOCKS and any(abs(clock.seconds) > _NOTABLE_SKEW for clock in diagnosis.clocks.values()):
        return Text("check", style="yellow")
    return Text("ok", style="green")


def _settings(diagnosis: Diagnosis) -> str:
    if not diagnosis.strategy:
        return ""
    if not diagnosis.environment:
        return f"strategy={diagnosis.strategy}"
    hosts, ranks = diagnosis.num_nodes, diagnosis.world_size
    return (
        f"strategy={diagnosis.strategy}, {ranks} rank{'s' * (ranks != 1)} on {hosts} host{'s' * (hosts != 1)},"
        f" known from {diagnosis.environment}"
    )


def _backends(diagnosis: Diagnosis, reports: Sequence[RankReport]) -> str:
    built = _differing([f"this torch has {', '.join(report.backends)}" for report in reports])
    return "\n".join([diagnosis.backend, *built] if diagnosis.backend else built)


def _interfaces(ranks: list[int], report: RankReport) -> str:
    useful = {name: [a for a in found if "%" not in a] for name, found in report.interfaces.items()}  # not link-local
    listed = "; ".join(f"{name} {', '.join(found)}".rstrip() for name, found in useful.items())
    return f"{report.host} ({list_ranks(ranks)}): {listed}"


def _versions(report: RankReport) -> str:
    return ", ".join(f"{name} {version}" for name, version in report.versions.items())


def _rendezvous(diagnosis: Diagnosis, reports: Sequence[RankReport]) -> str:
    if diagnosis.meeting_place is None:
        return ""
    ways = [
        f"{report.host}: {report.rendezvous_interface} ({report.rendezvous_address})"
        for report in reports
        if report.rendezvous_interface is not None
    ]
    return "\n".join([diagnosis.meeting_place, *ways])


def _clocks(diagnosis: Diagnosis) -> list[str]:
    return [
        f"{diagnosis.reports[rank].host}: {1e3 * clock.seconds:+.3f} ms, within {1e3 * clock.uncertainty:.3f} ms"
        for rank, clock in diagnosis.clocks.items()
    ]


def _times(rows: Sequence[AllReduceTime]) -> RenderableType:
    grid = Table.grid(padding=(0, 3))
    for name in ("size", "time", "algorithm", "bus"):
        grid.add_column(name, justify="right")
    grid.add_row("size", "time", "algorithm", "bus", style="dim")
    for row in rows:
        speeds = speed_text(row.algorithm_bandwidth), speed_text(row.bus_bandwidth)
        grid.add_row(size_text(row.size), time_text(row.seconds), *speeds)
    return grid


def _differing(lines: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(lines))


_ALWAYS_THERE = "gloo"  # what to meet with where the chosen backend or interface is missing


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSettings:
    """What the strategy is told about the network; see `Connection`.

    Attributes:
        backend: The backend; None for what suits the devices.
        init_method: Another rendezvous endpoint.
        network_interface: The interface.
        timeout: How long to wait for other ranks.
    """

    backend: str | None
    init_method: str | None
    network_interface: str | None
    timeout: timedelta


class _UnhealthyError(Exception):
    """A rank has found something wrong by itself: all ranks know, and none goes on."""


def examine(strategy: DDPStrategy | FSDPStrategy, settings: NetworkSettings, diagnosis: Diagnosis) -> None:
    """Meet the other ranks, compare hosts, make the process group and time it.

    Args:
        strategy: A strategy whose processes have been started.
        settings: The network.
        diagnosis: Filled with what is found.
    """
    environment = strategy.cluster_environment
    accelerator, device = strategy.accelerator, strategy.root_device
    assert environment is not None  # the Trainer gives every strategy both
    assert accelerator is not None
    strategy.set_world_ranks()
    backend = settings.backend or dist.get_default_backend_for_device(device)
    # The same order on every rank: MPI finds address and port by collective operations.
    rank, world_size = environment.global_rank(), environment.world_size()
    main_address, (main_port, *other_ports) = environment.main_address, meeting_ports(environment)
    diagnosis.rank, diagnosis.world_size, diagnosis.num_nodes = rank, world_size, strategy.num_nodes
    diagnosis.backend = backend
    diagnosis.meeting_place = settings.init_method or address_text(main_address, main_port)
    own = _find_problems(backend, device.type, settings.network_interface, strategy.num_nodes)
    diagnosis.add_problems(own)
    report = diagnosis.reports[rank] = report_here(own)

    def on_store_open(meeting: RendezvousInfo, opened: OpenStore) -> None:
        consultation = exchange_reports(meeting, opened, report)
        diagnosis.shared = True
        diagnosis.reports.update(consultation.reports)
        diagnosis.clocks.update(consultation.clocks)
        diagnosis.add_problems(consultation.problems)
        for said in consultation.reports.values():
            diagnosis.add_problems(said.problems)
        if not consultation.healthy:
            raise _UnhealthyError

    def connect_and_measure() -> None:
        accelerator.setup_device(device)
        diagnosis.network = init_process_group(
            backend=_ALWAYS_THERE if own else backend,
            rank=rank,
            world_size=world_size,
            main_address=main_address,
            main_port=main_port,
            other_ports=other_ports,
            run=step_name(os.environ) if other_ports else "",
            timeout=settings.timeout,
            init_method=settings.init_method,
            network_interface=None if own else settings.network_interface,
            num_nodes=strategy.num_nodes,
            device_id=device,
            on_store_open=on_store_open,
        )
        diagnosis.all_reduce = measure_all_reduce(device)

    _try(connect_and_measure, diagnosis)
    if dist.is_initialized():
        dist.destroy_process_group()


def _find_problems(backend: str, device_type: str, interface: str | None, num_nodes: int) -> list[Problem]:
    """Check what can be wrong on this host only, so that the others hear of it."""
    checks: list[tuple[str, Callable[[], None]]] = [
        (BACKEND, lambda: check_backend(backend, device_type)),
        (INTERFACES, lambda: check_interface(interface, num_nodes)),
        (INTERFACES, lambda: check_gloos_variable(backend, interface)),
    ]
    problems = []
    for name, check in checks:
        try:
            check()
        except DDPExtError as error:
            problems.append(Problem(name, str(error)))
    return problems


def _try(connect_and_measure: Callable[[], None], diagnosis: Diagnosis) -> None:
    try:
        connect_and_measure()
    except _UnhealthyError:
        if diagnosis.healthy:  # the problem is another rank's, and rank 0 says it
            diagnosis.add_problems([Problem(NETWORK, "another rank has found a problem.")])
    except NetworkInterfaceError as error:
        diagnosis.add_problems([Problem(NETWORK, f"{error}{_hint(diagnosis)}")])
    except DDPExtError as error:
        diagnosis.add_problems([Problem(RENDEZVOUS, str(error))])
    except RuntimeError as error:  # of the backend
        diagnosis.shared = False  # ranks may have met different errors
        reason = str(error).partition("\n")[0]
        text = (
            f"the process group of `{diagnosis.backend}` failed on rank {diagnosis.rank}: {reason}."
            " Look for a rank that has ended, and for a firewall between the hosts."
        )
        diagnosis.add_problems([Problem(NETWORK if diagnosis.network is None else ALL_REDUCE, text)])


def _hint(diagnosis: Diagnosis) -> str:
    """Name the interface over which other hosts have reached rank 0, if it is the same on all."""
    names = {report.rendezvous_interface for _, report in diagnosis.hosts()[1:]}
    return f" Rank 0 was reached over `{names.pop()}`." if len(names) == 1 and None not in names else ""


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
    check_run(config, config.hydra, trainer)
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

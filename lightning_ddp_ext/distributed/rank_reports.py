"""What every rank can say about its host before there is a process group, collected by rank 0."""

import dataclasses
import importlib.metadata
import json
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp_ext.distributed.backends import available_backends
from lightning_ddp_ext.distributed.interfaces import interface_addresses, interface_with
from lightning_ddp_ext.distributed.network_choice import this_machine
from lightning_ddp_ext.distributed.rendezvous import (
    RendezvousInfo,
    collect_responses,
    join_round,
    open_round,
    poll,
    publish_result,
)
from lightning_ddp_ext.distributed.stores import OpenStore

_PACKAGES = ("torch", "lightning", "lightning-ddp-ext")


_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far a clock is ahead of rank 0's.

    Attributes:
        seconds: The difference; negative if it is behind.
        uncertainty: How far the difference may be from the truth, in seconds: half of the shortest round trip.
    """

    seconds: float
    uncertainty: float


def ask_clock(store: dist.Store) -> ClockOffset:
    """Compare the clock of this rank with that of the rank that calls `tell_clock` on the same store.

    Args:
        store: A store of nobody else, such as a `PrefixStore`.

    Returns:
        The offset of the other clock.
    """
    rounds = []
    for number in range(_ROUNDS):
        asked, started = time.time(), time.perf_counter()
        store.set(f"asked/{number}", "")
        told = json.loads(store.get(f"told/{number}"))
        half = (time.perf_counter() - started) / 2
        rounds.append(ClockOffset(told - (asked + half), half))
    return min(rounds, key=lambda offset: offset.uncertainty)


def tell_clock(store: dist.Store) -> None:
    """Answer `ask_clock` of another rank.

    Args:
        store: The same store.
    """
    for number in range(_ROUNDS):
        store.wait([f"asked/{number}"])
        store.set(f"told/{number}", json.dumps(time.time()))


VERSIONS = "versions"

_CLOCK = "clock"
_HEARD = "heard"
_FAREWELL = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong.

    Attributes:
        check: What was looked at.
        text: What is wrong, and what to do about it.
    """

    check: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What a rank says about itself and its host.

    Attributes:
        host: Name of the host.
        machine: What is equal for ranks of one host.
        interfaces: Addresses by interface.
        backends: The backends of its torch.
        versions: Versions by what they are of.
        problems: What it has found wrong by itself.
        rendezvous_address: The address of this host on the way to rank 0; on rank 0's host, its own.
            None if that is every address, or a file.
        rendezvous_interface: The interface with this address.
    """

    host: str
    machine: str
    interfaces: Mapping[str, Sequence[str]]
    backends: Sequence[str]
    versions: Mapping[str, str]
    problems: Sequence[Problem] = ()
    rendezvous_address: str | None = None
    rendezvous_interface: str | None = None

    def at(self, address: str | None) -> "RankReport":
        """Return the same report with the address that turned out to lead to rank 0.

        Args:
            address: An address of this host.
        """
        interface = None if address is None else interface_with(address)
        name = None if interface is None else interface.name
        return dataclasses.replace(self, rendezvous_address=address, rendezvous_interface=name)


@dataclass(frozen=True, slots=True)
class ReportExchange:
    """What the ranks have said.

    Attributes:
        reports: Reports by rank; only that of this rank on others than rank 0.
        clocks: How far the clocks of other hosts are ahead of rank 0's, by their first rank; on rank 0.
        problems: What does not fit together; empty on others than rank 0.
        healthy: Whether no rank has a problem, known to all.
    """

    reports: Mapping[int, RankReport]
    clocks: Mapping[int, ClockOffset]
    problems: Sequence[Problem]
    healthy: bool


def report_here(problems: Sequence[Problem] = ()) -> RankReport:
    """Describe this process and its host.

    Args:
        problems: What is wrong here.

    Returns:
        The report.
    """
    return RankReport(
        host=socket.gethostname(),
        machine=this_machine(),
        interfaces=interface_addresses(),
        backends=available_backends(),
        versions={name.removeprefix("version of "): str(version) for name, version in describe_versions().items()},
        problems=problems,
    )


def exchange_reports(info: RendezvousInfo, opened: OpenStore, report: RankReport) -> ReportExchange:
    """Collect the reports of all ranks, and compare the clocks of hosts; every rank has to call it.

    Args:
        info: What this rank knows of the run.
        opened: The store where ranks meet.
        report: The report of this rank.

    Returns:
        What was said.

    Raises:
        RendezvousError: If ranks do not come in time.
    """
    report = report.at(opened.local_address)
    if info.rank == 0:
        return _collect(info, opened.store, report)

    def describe(request: Mapping[str, Any]) -> dict[str, Any]:
        return dataclasses.asdict(report)

    round_, table = join_round(opened.store, info.rank, info.world_size, describe, info.timeout)
    if info.rank in table["speakers"]:
        tell_clock(_clock_store(round_.store, info.rank))
    round_.store.add(_HEARD, 1)
    return ReportExchange({info.rank: report}, {}, (), table["healthy"])


def _collect(info: RendezvousInfo, store: dist.Store, own: RankReport) -> ReportExchange:
    round_ = open_round(store, info.world_size, {"run": info.run}, info.timeout)
    entries = collect_responses(round_, info.remedy)
    reports = {0: own, **{rank: _report_from(entry) for rank, entry in entries.items()}}
    machines = {own.machine: 0}
    for rank, report in reports.items():
        machines.setdefault(report.machine, rank)
    speakers = [rank for rank in machines.values() if rank != 0]
    problems = compare_versions(reports)
    healthy = not problems and not any(report.problems for report in reports.values())
    publish_result(round_, {"speakers": speakers, "healthy": healthy}, entries)
    clocks = {rank: ask_clock(_clock_store(round_.store, rank)) for rank in speakers}
    # The store ends with this process, which may have no reason to go on: give others time to read.
    others = info.world_size - 1
    poll(lambda: round_.store.add(_HEARD, 0) >= others, time.monotonic() + _FAREWELL)
    return ReportExchange(reports, clocks, problems, healthy)


def compare_versions(reports: Mapping[int, RankReport]) -> list[Problem]:
    """Find versions that differ between ranks, which training would refuse.

    Args:
        reports: Reports by rank.

    Returns:
        One problem for each package.
    """
    problems = []
    for name in next(iter(reports.values())).versions:
        found: dict[str, int] = {}
        for rank, report in reports.items():
            found.setdefault(report.versions.get(name, "missing"), rank)
        if len(found) > 1:
            listed = ", ".join(f"{version} on rank {rank} ({reports[rank].host})" for version, rank in found.items())
            text = f"versions of {name} differ: {listed}. Install the same versions on every host."
            problems.append(Problem(VERSIONS, text))
    return problems


def _report_from(entry: Mapping[str, Any]) -> RankReport:
    """Read a report as it came through JSON; what else the roll call carries is left out."""
    known = {field.name: entry[field.name] for field in dataclasses.fields(RankReport)}
    return RankReport(**{**known, "problems": tuple(Problem(**row) for row in entry["problems"])})


def _clock_store(store: dist.Store, rank: int) -> dist.Store:
    return dist.PrefixStore(f"{_CLOCK}/{rank}", store)


def describe_versions(packages: Sequence[str] = _PACKAGES) -> dict[str, object]:
    """Describe the versions of Python, without its last number, and of packages.

    Args:
        packages: Names of distributions.

    Returns:
        A description for `compare_setups`.
    """
    versions: dict[str, object] = {"version of Python": ".".join(platform.python_version_tuple()[:2])}
    for package in packages:
        # What runs, not what is installed: they differ in a source build.
        versions[f"version of {package}"] = torch.__version__ if package == "torch" else _installed(package)
    return versions


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

"""What `lightning-ddp-ext doctor` has found."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning_ddp_ext.network.bandwidth import AllReduceTime
from lightning_ddp_ext.network.choosing import ChosenNetwork
from lightning_ddp_ext.network.reports import Problem, RankReport
from lightning_ddp_ext.network.skew import ClockOffset

# What is looked at, in this order; `network.reports` adds "versions".
SETTINGS, SLURM, BACKEND, INTERFACES = "settings", "SLURM", "back-end", "interfaces"
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
        backend: The back-end; None for one process.
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
            "meeting_address": report.meeting_address,
            "meeting_interface": report.meeting_interface,
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

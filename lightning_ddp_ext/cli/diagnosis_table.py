"""The findings of `lightning-ddp-ext doctor` as one table and one line."""

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_ddp_ext.cli.diagnosis import (
    ALL_REDUCE,
    BACKEND,
    INTERFACES,
    NETWORK,
    RENDEZVOUS,
    SETTINGS,
    SLURM,
    Diagnosis,
    size_text,
    speed_text,
    time_text,
)
from lightning_ddp_ext.network.bandwidth import AllReduceTime
from lightning_ddp_ext.network.reports import VERSIONS, RankReport
from lightning_ddp_ext.parallel.messages.exchange import list_ranks

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
        f"{report.host}: {report.meeting_interface} ({report.meeting_address})"
        for report in reports
        if report.meeting_interface is not None
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

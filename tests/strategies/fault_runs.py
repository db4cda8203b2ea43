"""Runs of `fault_ranks` on processes of this machine, or on hosts of network namespaces, and what becomes of them."""

import contextlib
import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.distributed import rank_server
from tests.strategies.fault_ranks import CHECKPOINTS, GO_ON, OF_CHECKPOINTS, OF_LINKS, train
from tests.support.ports import free_port

_DISK = "1500k"  # room for some checkpoints
_CUT = 4.0  # seconds
_LEFTOVER = 8.0  # seconds that workers of loaders take to notice that their process is gone
_SUBREAPER = 36  # of prctl: processes whose parent has ended become ours, so that they are found


@dataclass(frozen=True)
class Fault:
    """A fault on a rank in a phase."""

    kind: str  # a key of `fault_ranks.FAULTS`
    rank: int
    phase: str  # a key of `fault_ranks.WHEN`


@dataclass
class FaultOutcome:
    """The outcome of a run."""

    fault: Fault
    seconds: float | None  # from the fault to the end of the last living rank; None after the hard limit
    rows: list[dict[str, Any]]  # of the ranks, see `rank_server.describe`
    checkpoints: int
    broken: list[str]  # checkpoints that cannot be loaded
    left: int = 0  # processes

    @property
    def living(self) -> list[dict[str, Any]]:
        """Outcomes of the ranks that could say something."""
        silent = self.fault.kind in ("kill -9", "SIGSTOP")
        return [row for row in self.rows if not (silent and row["rank"] == self.fault.rank)]

    @property
    def said(self) -> str:
        """What a rank said that was not the culprit, or the culprit if there is no other."""
        rows = sorted(self.rows, key=lambda row: row["rank"] == self.fault.rank)
        return next((row["error"] for row in rows if row["error"]), "")

    @property
    def is_right(self) -> bool:
        """Whether nothing hung, broke or stayed, and training went on or ended as it should."""
        completes = all(row["value"] for row in self.rows)
        goes_on = self.fault.kind in GO_ON
        return self.seconds is not None and completes == goes_on and not self.broken and not self.left


def list_faults(kinds: Sequence[str], phases: Sequence[str], ranks: Sequence[int] = (0, 1)) -> list[Fault]:
    """Return the faults there are of some kinds, in some phases, on some ranks."""
    return [
        Fault(kind, rank, phase)
        for kind in kinds
        for rank in ranks
        for phase in phases
        if rank == 0 or kind not in OF_CHECKPOINTS
    ]


def run_fault(
    fault: Fault, folder: Path, limit: float, hosts: Any = None, port: int = 29500, **options: Any
) -> FaultOutcome:
    """Train on two ranks with a fault; cut links need hosts of `tests.distributed.hosts` and a free port there."""
    (folder / CHECKPOINTS).mkdir(parents=True)
    settings = {
        "folder": str(folder), "fault": fault.kind, "culprit": fault.rank, "phase": fault.phase, "limit": limit,
        **options,
    }  # fmt: skip
    hard_limit = limit + 60
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with _small_disk(folder / CHECKPOINTS, fault.kind == "full disk"):
        if hosts is None:
            settings |= {"main_port": free_port()}
            jobs = [{"rank": rank, "arguments": {**settings, "rank": rank}} for rank in range(2)]
            rows = rank_server.run(train, jobs, hard_limit, folder)
        else:
            settings |= {"hosts": True, "main_address": "node1", "main_port": port}
            with _cutting(fault, hosts, folder):
                ranks = [(rank + 1, {**settings, "rank": rank}) for rank in range(2)]
                outcomes = hosts.run("train_with_fault", ranks, limit=hard_limit)
            rows = [vars(outcome) for outcome in outcomes]
        left = _count_left(before)
        checkpoints = list(folder.rglob("*.ckpt"))
        outcome = FaultOutcome(fault, None, rows, len(checkpoints), _list_broken(checkpoints), left)
    marker = folder / ("cut" if fault.kind in OF_LINKS else "fault")
    if marker.exists() and not any(row["timed_out"] for row in rows):
        outcome.seconds = max(row["ended"] for row in outcome.living) - float(marker.read_text())
    return outcome


def become_subreaper() -> None:
    """Adopt the processes that ranks leave behind, so that they can be counted."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)


def _count_left(before: set[int]) -> int:
    """Count processes below this one that do not end by themselves, and end them."""
    deadline = time.monotonic() + _LEFTOVER
    while (left := _list_left(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return len(left)


def _list_left(before: set[int]) -> list[psutil.Process]:
    left = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.pid in before:
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
            else:
                left.append(process)
    return left


def _list_broken(paths: Sequence[Path]) -> list[str]:
    """Return the names of checkpoints that cannot be loaded."""
    broken = []
    for path in paths:
        try:
            torch.load(path, weights_only=True)
        except Exception:
            broken.append(path.name)
    return broken


@contextlib.contextmanager
def _small_disk(folder: Path, is_wanted: bool) -> Iterator[None]:
    if not is_wanted:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def _cutting(fault: Fault, hosts: Any, folder: Path) -> Iterator[None]:
    """Cut the link of the culprit's host when training has got to the fault."""
    host = fault.rank + 1
    is_over = threading.Event()

    def cut() -> None:
        while not (folder / "fault").exists():
            if is_over.wait(0.05):
                return
        hosts.configure(host, "link set eth0 down")
        (folder / "cut").write_text(str(time.monotonic()))
        is_over.wait(_CUT if fault.kind == "link cut for 4 s" else None)
        hosts.configure(host, "link set eth0 up")

    thread = threading.Thread(target=cut)
    if fault.kind in OF_LINKS:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join()

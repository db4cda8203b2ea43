"""Our end of the line: a contender's processes, asleep except for its own turns."""

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from measuring.orders import HARD_LIMIT
from measuring.rounds import Burst

_LAST_LINES = 15
_END_LIMIT = 5.0  # seconds from the last word of a process to its end


class Contender:
    """One process, or one for each rank.

    Its processes are killed by `close`; if this process ends without calling it, they end by themselves. One that does
    not answer within the hard limit is an error.

    Args:
        module: What runs in each process.
        *arguments: Its command line.
        ranks: Number of processes, of which each knows its rank and where the first one is.
    """

    def __init__(self, module: str, *arguments: str, ranks: int = 1) -> None:
        self._name = " ".join([module, *arguments])
        self._processes: list[subprocess.Popen[bytes]] = []
        self._errors: list[Any] = []
        for environment in _build_environments(ranks):
            errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
            self._errors.append(errors)
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Ctrl-C ends this process, and this process them.
                start_new_session=True,
            )
            self._processes.append(process)

    def run(self, *, ranks: int | None = None, **order: object) -> Burst:
        """Wake the processes with an order, wait until all have carried it out, and return the first one's times.

        Args:
            ranks: How many of the processes get the order, the first ones; by default all. Others sleep on.
            **order: What to do, as the module understands it.

        Raises:
            RuntimeError: If a process failed or did not answer in time. The message quotes its last lines.
        """
        cores = _find_cores()
        processes = self._processes[:ranks]
        line = json.dumps(order if ranks is None else {"ranks": ranks, **order}).encode() + b"\n"
        before = _read_cpu_seconds_of_others([process.pid for process in self._processes])
        stolen, start = _read_stolen_seconds(cores), time.perf_counter()
        for process in processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                self._fail(process, _describe_end(process))
        deadline = start + HARD_LIMIT
        replies = [self._read(process, deadline) for process in processes]
        available = len(cores) * (time.perf_counter() - start)
        stolen = _read_stolen_seconds(cores) - stolen
        by_others = _read_cpu_seconds_of_others([process.pid for process in self._processes]) - before
        first = replies[0]
        return Burst(
            first["steps"],
            first["mean"],
            first["median"],
            first["longest"],
            by_others / available,
            stolen / available,
        )

    def _read(self, process: "subprocess.Popen[bytes]", deadline: float) -> dict[str, Any]:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.perf_counter()))
        if not ready:
            self._fail(process, f"did not answer within {HARD_LIMIT:g} s")
        line = process.stdout.readline()
        if not line:
            self._fail(process, _describe_end(process))
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _fail(self, process: "subprocess.Popen[bytes]", what: str) -> NoReturn:
        rank = self._processes.index(process)
        errors = self._errors[rank]
        errors.seek(0)
        lines = errors.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        raise RuntimeError("\n".join([f"`{self._name}`, process {rank}, {what}. Its last lines:", *lines]))

    def close(self) -> None:
        """Kill the processes; what they were doing is of no interest any more."""
        for process in self._processes:
            process.kill()
        for process, errors in zip(self._processes, self._errors, strict=True):
            process.communicate()
            errors.close()


@contextmanager
def closing_all(contenders: Sequence[Contender]) -> Iterator[None]:
    """Close contenders, whatever happens."""
    try:
        yield
    finally:
        for contender in contenders:
            contender.close()


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(_find_cores())


def _describe_end(process: "subprocess.Popen[bytes]") -> str:
    with suppress(subprocess.TimeoutExpired):
        return f"has ended with exit code {process.wait(_END_LIMIT)}"
    return "does not listen any more"


def _find_cores() -> list[int]:
    affinity = getattr(psutil.Process(), "cpu_affinity", None)  # macOS has none
    return affinity() if affinity else list(range(psutil.cpu_count() or 1))


def _read_cpu_seconds_of_others(ours: Sequence[int]) -> float:
    """CPU time of all processes that are neither ours nor this one, as far as the system lets us see them.

    That of their ended children is part of it, so that a difference of two readings is right also if processes came
    and went between them.
    """
    seconds = 0.0
    for process in psutil.process_iter():
        if process.pid not in ours and process.pid != os.getpid():
            with suppress(psutil.Error):  # it ended meanwhile, or macOS does not tell
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def _read_stolen_seconds(cores: Sequence[int]) -> float:
    """Seconds that a hypervisor kept the cores from running what was ready to run, added up."""
    times = psutil.cpu_times(percpu=True)
    return sum(getattr(times[core], "steal", 0.0) for core in cores)


def _build_environments(ranks: int) -> list[dict[str, str]]:
    folder = str(Path(__file__).parent.parent)
    path = os.pathsep.join(part for part in (folder, os.environ.get("PYTHONPATH")) if part)
    shared = {**os.environ, "PYTHONPATH": path}
    if ranks == 1:
        return [shared]
    # As `torchrun` or a cluster would: every rank is started here and gets its own orders, so that a resting rank
    # sleeps in a read, and none waits for another in a collective.
    shared |= {
        "NODE_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    return [{**shared, "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def find_free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])

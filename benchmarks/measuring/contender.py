"""Our end of the line: a contender's processes, asleep except for its own turns."""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from measuring.orders import HARD_LIMIT, serve
from measuring.rounds import Burst
from tests.support.ports import free_port

_LAST_LINES = 15
_END_LIMIT = 5.0  # seconds from the last word of a process to its end

_forking = multiprocessing.get_context("fork")


class Contender:
    """One process, or one for each rank, forked from this one.

    Processes that are started separately may be slower or faster by a quarter for as long as they live, depending on
    where their memory happens to lie; forks of one process share that luck. They are killed by `close`; if this process
    ends without calling it, they end by themselves. One that does not answer within the hard limit is an error.

    Each process calls `carry_out` with `Orders` and the items of each order. `tree` is the folder that holds the
    package to be used; this process must not have imported the package.
    """

    def __init__(self, carry_out: Callable[..., None], ranks: int = 1, tree: Path | None = None) -> None:
        self._name = f"{carry_out.__module__}.{carry_out.__qualname__}"
        self._processes: list[BaseProcess] = []
        self._pipes, self._errors = [], []
        for environment in _build_environments(ranks):
            errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
            ours, theirs = _forking.Pipe()
            arguments = (carry_out, theirs, errors.fileno(), environment, tree)
            process = _forking.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._errors.append(errors)
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, *, ranks: int | None = None, **order: object) -> Burst:
        """Wake the first processes, or all, with an order, wait until it is done, and return the first one's times.

        An error quotes the last lines of a process that failed or did not answer in time.
        """
        cores, chosen = _find_cores(), range(len(self._processes))[:ranks]
        before = _read_cpu_seconds_of_others(self._pids)
        stolen, start = _read_stolen_seconds(cores), time.perf_counter()
        for rank in chosen:
            with suppress(BrokenPipeError):  # the reading fails then
                self._pipes[rank].send(order if ranks is None else {"ranks": ranks, **order})
        replies = [self._read(rank, start + HARD_LIMIT) for rank in chosen]
        available = len(cores) * (time.perf_counter() - start)
        stolen = (_read_stolen_seconds(cores) - stolen) / available
        by_others = (_read_cpu_seconds_of_others(self._pids) - before) / available
        return Burst(**replies[0], by_others=by_others, stolen=stolen)

    @property
    def _pids(self) -> list[int | None]:
        return [process.pid for process in self._processes]

    def _read(self, rank: int, deadline: float) -> dict[str, Any]:
        what = f"did not answer within {HARD_LIMIT:g} s"
        try:
            if self._pipes[rank].poll(max(0.0, deadline - time.perf_counter())):
                reply: dict[str, Any] = self._pipes[rank].recv()
                return reply
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_END_LIMIT)
            what = f"has ended with exit code {self._processes[rank].exitcode}"
        errors = self._errors[rank]
        errors.seek(0)
        lines = errors.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        raise RuntimeError("\n".join([f"`{self._name}`, process {rank}, {what}. Its last lines:", *lines]))

    def close(self) -> None:
        """Kill the processes; what they were doing is of no interest any more."""
        for process in self._processes:
            process.kill()
        for process, errors in zip(self._processes, self._errors, strict=True):
            process.join()
            errors.close()


@contextmanager
def closing_all(contenders: Iterable[Contender]) -> Iterator[None]:
    """Close contenders, whatever happens."""
    try:
        yield
    finally:
        for contender in contenders:
            contender.close()


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(_find_cores())


def _find_cores() -> list[int]:
    affinity = getattr(psutil.Process(), "cpu_affinity", None)  # macOS has none
    return affinity() if affinity else list(range(psutil.cpu_count() or 1))


def _read_cpu_seconds_of_others(ours: Sequence[int | None]) -> float:
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
    if ranks == 1:
        return [{}]
    # As `torchrun` or a cluster would: every rank is started here and gets its own orders, so that a resting rank
    # sleeps, and none waits for another in a collective.
    shared = {
        "NODE_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    return [{**shared, "LOCAL_RANK": str(rank)} for rank in range(ranks)]

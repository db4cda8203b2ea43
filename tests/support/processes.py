"""Run a function on several processes of this machine under a hard time limit.

The processes are forked from one template process, the fork server of `multiprocessing`, which has imported Lightning.
"""

import atexit
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import psutil

from tests.support import devices
from tests.support.ports import free_port

T = TypeVar("T")

_PRELOADED = ["lightning_ddp_ext.callbacks", "torchmetrics", "pytest", __name__]
_GRACE = 5.0  # seconds in which other ranks may report failures of their own after the first failure
_LAST_LINES = 20  # of the output of each rank, in an error
_POLL = 0.02  # seconds
_STACK_LIMIT = 2.0  # seconds in which living ranks write their stacks
_KILL_LIMIT = 5.0  # seconds; only a process in an uninterruptible system call takes longer


class RankError(RuntimeError):
    """A rank raised, exited, or was killed; the message starts with the first failure and describes every rank."""


class RankTimeoutError(RuntimeError):
    """The hard limit passed; the message shows the last lines and the Python stack of every rank."""


def run_processes(
    function: Callable[..., T],
    world_size: int,
    *args: object,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    **kwargs: object,
) -> list[T]:
    """Call `function(*args, **kwargs)` on `world_size` processes and return the results in the order of ranks.

    The environment of each process has `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`,
    `MASTER_PORT` and `OMP_NUM_THREADS=1`, so that `init_process_group("gloo")` works; `env` adds to it, and None
    removes a variable. The function must be at the top level of a module, and the results picklable.

    Each process leads its own session. When this function returns or raises, no process of these sessions is left; if
    the calling process is killed, they end by themselves. Output of ranks is printed here, or quoted in the error.

    Raises `RankError` if a rank fails, and `RankTimeoutError` after `timeout` seconds.
    """
    started = time.monotonic()
    shared = {**os.environ, "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    call = pickle.dumps((function, args, kwargs))
    with tempfile.TemporaryDirectory(prefix="run_processes_", ignore_cleanup_errors=True) as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                merged = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})}
                environment = {name: value for name, value in merged.items() if value is not None}
                ranks.append(_Rank(rank, Path(folder, f"rank{rank}"), call, environment))
                ranks[-1].start()
            _wait(ranks, started + timeout)
            _collect_stacks(ranks)
        finally:
            _kill_sessions([rank.process for rank in ranks])
        failed = sorted((rank for rank in ranks if rank.failure), key=lambda rank: rank.failed_at)
        if failed or any(rank.is_running for rank in ranks):
            description = "\n".join(line for rank in ranks for line in rank.describe())
            if failed:
                raise RankError(f"{failed[0].name} of {world_size} {failed[0].failure}.\n{description}")
            hanging = ", ".join(rank.name for rank in ranks if rank.is_running)
            raise RankTimeoutError(f"{hanging} did not finish within `timeout`={timeout:g} seconds.\n{description}")
        for rank in ranks:  # here rather than during the run, so that pytest attributes the output to the test
            for line in rank.read_output():
                print(f"[{rank.name}] {line}")
        return [pickle.loads(rank.read("result")) for rank in ranks]


class _Rank:
    """The process of a rank and the files that the process writes."""

    def __init__(self, rank: int, folder: Path, call: bytes, environment: dict[str, str]) -> None:
        folder.mkdir()
        self._folder = folder
        self.name = f"rank {rank}"
        self.failure = ""
        self.failed_at = time.monotonic()  # until a failure: when the process was last seen alive
        self.is_running = True
        self._stack = ""
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=_run_rank, args=(str(folder), call, environment))

    def start(self) -> None:
        """Start the process."""
        _start_template()
        self.process.start()

    def read(self, name: str) -> bytes:
        """Return the contents of a file of this rank, which is empty until the rank has written it."""
        file = self._folder / name
        return file.read_bytes() if file.exists() else b""

    def read_output(self) -> list[str]:
        """Return the lines of stdout and stderr."""
        return self.read("output").decode(errors="replace").splitlines()

    def poll(self) -> None:
        """Find out if the function or the process has ended."""
        code = self.process.exitcode
        self.is_running = code is None
        if self.failure:
            return
        if report := self.read("failure"):
            self.failed_at, self.failure = pickle.loads(report)
        elif code is None:
            self.failed_at = time.monotonic()
        elif code or not self.read("result"):
            names = {item.value: item.name for item in signal.Signals}
            end = f"exited with code {code}" if code >= 0 else f"was killed by {names.get(-code, -code)}"
            self.failure = f"{end} {'after' if self.read('result') else 'before'} its function returned"

    def request_stack(self) -> bool:
        """Have the process write the Python stacks of its threads; return False if it cannot."""
        if not (self._folder / "stack").exists():  # nothing handles the signal yet, so it would end the process
            return False
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGQUIT)
        return True

    def read_stack(self) -> str:
        """Return the stacks of all threads, except the thread that waits for the end of the caller."""
        threads = self.read("stack").decode(errors="replace").split("\n\n")
        return "\n\n".join(thread.strip("\n") for thread in threads if "_end_with_caller" not in thread)

    def describe(self) -> list[str]:
        """Describe the state of this rank, with the stack and the last lines of output."""
        state = self.failure or ("not finished" if self.is_running else "finished")
        if self.is_running and self.read("result"):
            state = "not finished: its function returned, but its process did not end"
        lines = ["", f"--- {self.name} {state} ---"]
        if self.is_running:
            lines += ["Python stack when it was killed:", self.read_stack() or "none: the process did not answer"]
        output = self.read_output()[-_LAST_LINES:]
        return lines + (["last lines of output:", *(f"  {line}" for line in output)] if output else ["no output"])


def _start_template() -> None:
    """Start the process from which ranks are forked, if it does not run."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    # The template finds modules where this process does. OMP_NUM_THREADS is read when torch is imported.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    with mock.patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()


def _wait(ranks: Sequence[_Rank], deadline: float) -> None:
    """Return when all ranks have ended, at the deadline, or `_GRACE` seconds after the first failure."""
    while any(rank.is_running for rank in ranks) and time.monotonic() < deadline:
        connection.wait([rank.process.sentinel for rank in ranks if rank.is_running], _POLL)
        for rank in ranks:
            rank.poll()
        deadline = min([deadline, *(rank.failed_at + _GRACE for rank in ranks if rank.failure)])


def _collect_stacks(ranks: Sequence[_Rank]) -> None:
    """Have all living ranks write their stacks, and wait until the files have stopped growing."""
    asked = [rank for rank in ranks if rank.is_running and rank.request_stack()]
    before: list[str] = []
    deadline = time.monotonic() + _STACK_LIMIT
    while asked and time.monotonic() < deadline:
        time.sleep(5 * _POLL)
        stacks = [rank.read_stack() for rank in asked]
        if all(stacks) and stacks == before:
            return
        before = stacks


def _kill_sessions(leaders: Sequence[Any]) -> None:
    """Kill the processes of all ranks with everything that these have started, and return when all are gone."""
    leaders = [process for process in leaders if process.pid is not None]
    for process in leaders:
        process.kill()  # by its id, since it may not lead a session yet
    sessions = {process.pid for process in leaders}
    deadline = time.monotonic() + _KILL_LIMIT
    while (members := [pid for pid in psutil.pids() if _is_member(pid, sessions)]) and time.monotonic() < deadline:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL / 2)
    for process in leaders:
        process.join(_KILL_LIMIT)


def _is_member(pid: int, sessions: set[int]) -> bool:
    with suppress(ProcessLookupError, PermissionError, psutil.Error):
        return os.getsid(pid) in sessions and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


# From here on: what runs in the process of a rank.


def _run_rank(folder: str, call: bytes, environment: dict[str, str]) -> None:
    """Make the call in this process and write the outcome to files in `folder`."""
    os.setsid()
    output = os.open(os.path.join(folder, "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed process cannot flush
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # or workers of loaders would be started as this process was
    sys.modules["numpy"].random.seed()  # as in a fresh process; forked ones would all draw the same numbers
    # SIGUSR1 and SIGTERM are handled by Lightning, SIGUSR2 by submitit. The handler for stacks is written in C, so it
    # answers while the main thread is stuck in C.
    faulthandler.enable()
    stack = open(os.path.join(folder, "stack"), "w")  # noqa: SIM115  # open until the process ends
    faulthandler.register(signal.SIGQUIT, file=stack, all_threads=True)
    threading.Thread(target=_end_with_caller, daemon=True).start()
    try:
        devices.accelerator()  # torch's autograd engine finds out about devices when it first runs
        function, args, kwargs = pickle.loads(call)
        _write(folder, "result", pickle.dumps(function(*args, **kwargs)))
        _leave_process_group()
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exc()
        summary = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
        _write(folder, "failure", pickle.dumps((time.monotonic(), f"raised {summary}")))
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # processes of multiprocessing do not


def _end_with_caller() -> None:
    """Kill this rank and everything it has started when the calling process has ended."""
    connection.wait([multiprocessing.parent_process().sentinel])  # type: ignore[union-attr]
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _leave_process_group() -> None:
    """Destroy the process group: threads of gloo may hold tensors while the interpreter ends, which aborts it."""
    distributed = sys.modules["torch.distributed"]
    if distributed.is_available() and distributed.is_initialized():
        importlib.import_module("lightning_ddp_ext.distributed.exchange").destroy_group()


def _write(folder: str, name: str, data: bytes) -> None:
    """Write a file that is either complete or absent."""
    draft = Path(folder, f"{name}.draft")
    draft.write_bytes(data)
    draft.replace(Path(folder, name))

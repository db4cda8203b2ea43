"""Functions that run in forks of this process, which they cannot change, within a time limit."""

import faulthandler
import gc
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from lightning_ddp_ext.distributed.backends import DEFAULT_TIMEOUT
from lightning_ddp_ext.distributed.network import listen
from lightning_ddp_ext.distributed.stores import serve_socket
from lightning_ddp_ext.errors import ImpossibleError, OtherRankError, describe_error
from lightning_ddp_ext.verification.operations import FORKING, Line, is_own_file

_REPORT = 1.0  # seconds before the end in which processes write where they are
_GRACE, _RAISED = 3.0, "ddp_ext_raised_at"  # seconds for the errors of other processes, after the first
_LOOKS = 50  # at processes, to see whether any of them computes
_LAST_LINES = 12  # of a process that has ended without a result
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in', re.MULTILINE)
_COLLECTIVES = "distributed_c10d.py"  # the file of torch's collectives
# Texts of gloo and of stores in the errors of ranks whose peer has ended, and of ranks that get another tensor.
_LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|Broken pipe|gloo")
_UNEQUAL = re.compile(r"op\.preamble\.length|EnforceNotMet")
_OF_RANKS = "one process does not end so: leave out what depends on ranks, or give ranks more memory if they are killed"
_SAME_CALLS = "let all ranks make the same collective calls, with tensors of the same shape"
_forking = get_context("fork")


class FailedError(ImpossibleError):
    """A function has failed, at a line of the program if that is known."""

    def __init__(self, text: str, line: Line | None = None, remedy: str = "") -> None:
        super().__init__(text)
        self.line, self.remedy = line, remedy


class TooLateError(ImpossibleError):
    """The time is up. Is a deadlock if the process `place` waits at a line for one that has ended or waits, too."""

    def __init__(self, place: int, line: Line | None, is_deadlock: bool) -> None:
        super().__init__("it did not end in time. Give more time with `limit`")
        self.place, self.line, self.is_deadlock = place, line, is_deadlock


class _Failure(NamedTuple):
    """Error of a process. The one that compares least has caused the errors of other processes."""

    is_lost: bool  # the connection to another rank
    time: float
    place: int
    text: str
    line: Line | None


def run_forked(functions: Sequence[Callable[[], Any]], deadline: float, are_ranks: bool = False) -> list[Any]:
    """Run each function in a separate fork, all at the same time; return their results in order.

    All forks are killed soon after one fails, or at `deadline`, a time of `time.monotonic()`. If functions `are_ranks`,
    they find each other in a store of this process.

    Raises:
        FailedError: If a function raises an error or its process ends, with the error that was raised first.
        TooLateError: If the time is up.
    """
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    with ExitStack() as stack:
        variables = {}
        if are_ranks:
            # As torchrun's agent does. It listens on a port that is free, without a moment in which another takes it.
            listening = stack.enter_context(listen("127.0.0.1", 0))
            variables = launch_variables(len(functions), listening.getsockname()[1])
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in functions]
        pipes: list[Connection] = []
        processes: list[Any] = []
        for place, function in enumerate(functions):
            ours, theirs = _forking.Pipe(duplex=False)
            own = {**variables, "LOCAL_RANK": str(place)} if are_ranks else {}
            arguments = function, theirs, outputs[place].fileno(), deadline, own
            processes.append(_forking.Process(target=_run, args=arguments))  # no daemon, which may have no children
            processes[-1].start()
            stack.callback(_end, processes[-1], ours)
            theirs.close()
            pipes.append(ours)
        if are_ranks:
            # Its thread starts after the forks, which would keep a lock of the C library that it holds meanwhile.
            stores = [serve_socket(listening, "127.0.0.1", len(functions), DEFAULT_TIMEOUT)]
            stack.callback(stores.clear)  # at the end, also if an error keeps this frame
        while len(results) + len(failures) < len(pipes):
            ended = {*results, *(one.place for one in failures)}
            open_ = {pipe: place for place, pipe in enumerate(pipes) if place not in ended}
            ready: list[Any] = wait(open_, timeout=max(0.0, deadline - time.monotonic()))
            if not ready and failures:
                break
            if not ready:
                pids = [processes[place].pid for place in open_.values()]
                raise _find_waiting({place: _read(outputs[place]) for place in open_.values()}, pids)
            for place in (open_[pipe] for pipe in ready):
                try:
                    is_result, value = pickle.loads(pipes[place].recv_bytes())
                except EOFError:
                    processes[place].join()
                    is_result, value = False, _describe_end(processes[place].exitcode, _read(outputs[place]))
                if is_result:
                    results[place] = value
                else:
                    deadline = min(deadline, time.monotonic() + _GRACE)
                    failures.append(_Failure(value[0], value[1], place, *value[2:]))
    if failures:
        raise _explain(failures, len(functions))
    return [results[place] for place in range(len(functions))]


def launch_variables(ranks: int, port: int) -> dict[str, str]:
    """Return the variables of Lightning's launcher, for ranks that connect to a store of their parent process."""
    return {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "NODE_RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": str(port > 0),
        # torch asks the name server for the name of each address, and waits for 10 s if it does not answer.
        "RES_OPTIONS": "timeout:1 attempts:1",
    }  # fmt: skip


def _end(process: Any, pipe: Connection) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and the workers of its loaders, which may outlive it
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    pipe.close()


def _explain(failures: Sequence[_Failure], number: int) -> FailedError:
    """Return the error that was raised first, without its consequences."""
    first = min(failures, key=lambda one: one[:3])
    rank = f"rank {first.place} fails first: " if number > 1 else ""
    if not first.is_lost:
        return FailedError(f"{rank}{first.text}", first.line, _OF_RANKS if number > 1 else "")
    unequal = next((one for one in failures if _UNEQUAL.search(one.text)), None)
    text = "loses its connection to other ranks in a collective call"
    text = "gets a tensor of another size in a collective call than it gives" if unequal else text
    at = unequal or first
    return FailedError(f"rank {at.place} {text}", at.line or first.line, _SAME_CALLS)


def _describe_end(code: int | None, output: str) -> tuple[bool, float, str, Line | None]:
    """Describe how a process has ended that has sent no result."""
    how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
    lines = "\n".join(output.rstrip().splitlines()[-_LAST_LINES:])
    is_lost = code == -signal.SIGABRT and _LOST.search(output) is not None
    line = next((one for one in _stack_in(output) if is_own_file(one.file)), None) if is_lost else None
    text = f"its process ended with {how}" + (f"; its last lines:\n{lines}" if lines else "")
    return is_lost, time.monotonic(), output if is_lost else text, line


def _read(output: Any) -> str:
    output.seek(0)
    return str(output.read().decode(errors="replace"))


def _stack_in(output: str) -> list[Line]:
    """Return the stack that `faulthandler` has written at the end, the innermost line first."""
    text = output.rpartition("(most recent call first)")[2].partition(FORKING)[0]
    return [Line(file, int(number)) for file, number in _FRAME.findall(text)]


def _find_waiting(outputs: dict[int, str], pids: Sequence[int]) -> TooLateError:
    stacks = {place: _stack_in(output) for place, output in outputs.items()}
    communicates = any(stack and stack[0].file.endswith(_COLLECTIVES) for stack in stacks.values())
    for _ in range(_LOOKS if communicates else 0):  # a process that computes is not asleep, whatever the load is
        time.sleep(0.01)
        communicates &= all(psutil.Process(pid).status() != psutil.STATUS_RUNNING for pid in pids)
    place, stack = next(iter(stacks.items()))
    return TooLateError(place, next((one for one in stack if is_own_file(one.file)), None), communicates)


def write_stacks_in(seconds: float) -> None:
    """Write the stacks of all threads to standard error after `seconds`, from a thread that holds the GIL.

    `faulthandler.dump_traceback_later` does not hold it, and can end a process that computes in Python with SIGSEGV.
    Nothing is written while a call of a C extension keeps the GIL; the error then names no line.
    """
    timer = threading.Timer(seconds, faulthandler.dump_traceback, kwargs={"file": 2})
    timer.daemon = True
    timer.start()


def note_time(error: BaseException) -> None:
    """Note when an error was raised, before the clean-up that lets other processes fail."""
    error.__dict__.setdefault(_RAISED, time.monotonic())


def _run(
    function: Callable[[], Any], pipe: Connection, output: int, deadline: float, variables: dict[str, str]
) -> None:
    gc.freeze()  # or garbage of the parent is collected here: a store would end the process, as its thread is not here
    os.setpgid(0, 0)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    faulthandler.enable(file=2)  # gloo aborts the process of a rank whose peer has ended
    write_stacks_in(max(0.1, deadline - time.monotonic() - _REPORT))
    warnings.simplefilter("ignore")  # for warnings that are errors in this process
    torch.set_num_threads(1)  # since threads of OpenMP do not survive a fork
    os.environ["OMP_NUM_THREADS"] = "1"  # which keeps Lightning from setting another number
    try:
        message: Any = True, function()
    except Exception as error:
        traceback.print_exc()
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        frames = traceback.extract_tb(cause.__traceback__)
        own = [Line(one.filename, one.lineno or 0) for one in frames if is_own_file(one.filename)]
        text = str(error) if isinstance(error, ImpossibleError) else describe_error(error)
        is_lost = isinstance(error, OtherRankError | dist.DistError) or (
            type(error) is RuntimeError and _LOST.search(text) is not None
        )
        raised = float(error.__dict__.get(_RAISED, time.monotonic()))
        message = False, (is_lost, raised, text, next(reversed(own), None))
    pipe.send_bytes(pickle.dumps(message))
    pipe.close()
    sys.stdout.flush()
    os._exit(0)  # without the clean-up of the parent process

"""Functions that run in forks of this process, which they cannot change, within a time limit."""

import faulthandler
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from lightning_ddp_ext.errors import ImpossibleError, describe_error
from lightning_ddp_ext.verification.operations import FORKING, Line, is_own_file

_REPORT = 1.0  # seconds before the end in which processes write where they are
_GRACE, _RAISED = 3.0, "_raised_at"  # seconds for the errors of other processes, after the first
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in', re.MULTILINE)
_COLLECTIVES = "distributed_c10d.py"  # the file of torch's collectives
_LAST_LINES = 12  # of the output of a process that ended without a result
_forking = get_context("fork")


class TooLateError(ImpossibleError):
    """The time is up.

    Attributes:
        waiting: The processes that have no result, by number, and the line at which each is.
        communicates: Whether one of them waits in a collective of the program.
    """

    def __init__(self, waiting: Mapping[int, Line | None], communicates: bool) -> None:
        super().__init__("it did not end in time. Give more time with `limit`")
        self.waiting, self.communicates = waiting, communicates


def run_forked(functions: Sequence[Callable[[], Any]], deadline: float) -> list[Any]:
    """Run each function in a fork of its own, all at the same time; return their results in order.

    All forks are killed soon after one fails, or at `deadline`, a time of `time.monotonic()`. If several fail, as ranks
    do that lose their connection, the first error is raised.

    Raises:
        ImpossibleError: If a function raises an error or its process ends.
        TooLateError: If the time is up.
    """
    pipes: list[Connection] = []
    processes = []
    outputs: list[Any] = []
    results: dict[int, Any] = {}
    failures: list[tuple[float, str]] = []  # when errors were raised, and their texts
    try:
        for function in functions:
            ours, theirs = _forking.Pipe(duplex=False)
            outputs.append(tempfile.TemporaryFile())  # noqa: SIM115  closed below
            process = _forking.Process(
                target=_run, args=(function, theirs, outputs[-1].fileno(), deadline), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        while len(results) < len(pipes):
            open_ = [pipe for place, pipe in enumerate(pipes) if place not in results]
            ready = wait(open_, timeout=max(0.0, deadline - time.monotonic()))
            if not ready and failures:
                break
            if not ready:
                waiting = [place for place in range(len(pipes)) if place not in results]
                stacks = {place: _stack_in(outputs[place]) for place in waiting}
                own = {place: [one for one in stack if is_own_file(one.file)] for place, stack in stacks.items()}
                raise TooLateError(
                    {place: next(iter(lines), None) for place, lines in own.items()},
                    any(stack and stack[0].file.endswith(_COLLECTIVES) for stack in stacks.values()),
                )
            for pipe in ready:
                place = pipes.index(pipe)  # type: ignore[arg-type]
                results[place], *failed = _receive(pipe, outputs[place])  # type: ignore[arg-type]
                if failed and not failures:
                    deadline = min(deadline, time.monotonic() + _GRACE)
                failures += failed
        if failures:
            raise ImpossibleError(min(failures)[1])
    finally:
        for process in processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        for pipe in pipes:
            pipe.close()
        for output in outputs:
            output.close()
    return [results[place] for place in range(len(functions))]


def _receive(pipe: Connection, output: Any) -> tuple[Any, ...]:
    """Return the result of a process, or None and its failure."""
    try:
        is_result, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None, (0.0, f"its process ended{_last_lines(output)}")
    return (value,) if is_result else (None, value)


def _last_lines(output: Any) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").rstrip().splitlines()[-_LAST_LINES:]
    return "; its last lines:\n" + "\n".join(lines) if lines else ""


def _stack_in(output: Any) -> list[Line]:
    """Return the stack that a process has written before the end, the innermost line first."""
    output.seek(0)
    text = output.read().decode(errors="replace").rpartition("(most recent call first)")[2].partition(FORKING)[0]
    return [Line(file, int(number)) for file, number in _FRAME.findall(text)]


def note_time(error: BaseException) -> None:
    """Note when an error was raised, before the clean-up that lets other processes fail."""
    error.__dict__.setdefault(_RAISED, time.monotonic())


def _time_of(error: BaseException) -> float:
    return float(error.__dict__.get(_RAISED, time.monotonic()))


def _run(function: Callable[[], Any], pipe: Connection, output: int, deadline: float) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(max(0.1, deadline - time.monotonic() - _REPORT), file=2)
    warnings.simplefilter("ignore")  # for warnings that are errors in this process
    torch.set_num_threads(1)  # since threads of OpenMP do not survive a fork
    try:
        message = True, function()
    except ImpossibleError as error:
        message = False, (_time_of(error), str(error))
    except Exception as error:
        traceback.print_exc()
        message = False, (_time_of(error), describe_error(error))
    pipe.send_bytes(pickle.dumps(message))
    pipe.close()
    sys.stdout.flush()
    os._exit(0)  # without the clean-up of the parent process

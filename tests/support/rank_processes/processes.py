"""Running a function on several processes under a hard time limit."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

from tests.support.rank_processes import _worker
from tests.support.rank_processes._handover import pack_call, unpack_result
from tests.support.rank_processes._killing import kill_sessions
from tests.support.rank_processes._process import Start, Started, template_for
from tests.support.rank_processes._rank import Rank, collect_stacks
from tests.support.rank_processes._report import describe_failures, describe_timeout
from tests.support.rank_processes.errors import RankError, RankTimeoutError
from tests.support.rank_processes.ports import free_port

_POLL = 0.02  # seconds

T = TypeVar("T")


def run_processes(
    function: Callable[..., T],
    world_size: int,
    *args: object,
    timeout: float = 60.0,
    grace: float = 5.0,
    last_lines: int = 20,
    env: Mapping[str, str | None] | None = None,
    preload: Sequence[str] = (),
    **kwargs: object,
) -> list[T]:
    """Call a function on several fresh processes of this machine and return the results, or fail in bounded time.

    The environment of each process holds what `torch.distributed.init_process_group("gloo")` needs: `RANK`,
    `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, a free port of this call. Also
    `OMP_NUM_THREADS=1`, so that the processes of a test do not fight for cores.

    Each process leads its own session. When this function returns or raises, whatever the reason, no process of
    these sessions is left; when the calling process is killed, they end by themselves. A hang therefore costs
    `timeout` seconds and two more for the stacks. What a process prints is printed here at the end, with its rank,
    or quoted in the error.

    Needs a POSIX system. A process that makes a session of its own (a daemon) escapes.

    Args:
        function: What to call, as `function(*args, **kwargs)`. It must be importable: defined at the top level of a
            module or a script. Its module is imported in each process, so keep that module cheap to import.
        world_size: Number of processes.
        *args: Positional arguments, picklable.
        timeout: Hard limit in seconds, counted from the call; includes starting the interpreters.
        grace: Seconds that the other ranks have left when one fails, so that they can report failures of their own.
        last_lines: How many lines of output per rank an error quotes.
        env: Additions to the environment, winning over the above; `None` removes a variable.
        preload: Modules that a process of its own imports when this is first called with them; ranks are forked from
            it and find them imported, which saves them the seconds that importing Lightning takes. They are no
            fresh interpreters then: variables that libraries read when they are imported are those of that first
            call, and all ranks hash texts alike. On Linux; elsewhere ranks import what they need.
        **kwargs: Keyword arguments, picklable. Bind names that are taken here with `functools.partial`.

    Returns:
        What `function` returned, in the order of ranks.

    Raises:
        ImportError: If a module of `preload` cannot be imported; no rank was started.
        TypeError: If `function` or an argument cannot be sent to another process; nothing was started.
        ValueError: If a number is out of range; nothing was started.
        RankError: If a rank raised, exited with another code than 0, was killed, or returned what cannot be pickled.
        RankTimeoutError: If the hard limit passed first.

    Example:
        ```python
        # ranks.py
        def sum_of_ranks(offset: int) -> float:
            torch.distributed.init_process_group("gloo")
            value = torch.tensor(float(torch.distributed.get_rank() + offset))
            torch.distributed.all_reduce(value)
            return value.item()

        # test_ranks.py
        def test_sum() -> None:
            assert run_processes(sum_of_ranks, 2, offset=10, timeout=30) == [21.0, 21.0]
        ```
    """
    _check_numbers(world_size, timeout, grace, last_lines)
    _check_platform_and_caller()
    call = pack_call(function, args, kwargs)
    environments = _build_environments(world_size, env or {})
    started = time.monotonic()
    start = _choose_start(preload, timeout)
    with tempfile.TemporaryDirectory(prefix="run_processes_", ignore_cleanup_errors=True) as folder:
        ranks = _run_ranks(start, Path(folder), call, environments, started + timeout, grace)
        if any(rank.failure for rank in ranks):
            raise RankError(describe_failures(ranks, started, last_lines))
        if any(rank.exit_code is None for rank in ranks):
            raise RankTimeoutError(describe_timeout(ranks, started, last_lines, timeout))
        _forward_output(ranks)
        return [cast(T, _read_result(rank)) for rank in ranks]


def _check_numbers(world_size: int, timeout: float, grace: float, last_lines: int) -> None:
    if world_size < 1:
        raise ValueError(f"`world_size` must be at least 1, got {world_size}. Use 1 for a single process.")
    if not timeout > 0:
        raise ValueError(f"`timeout` must be above 0 seconds, got {timeout}. Use 60 if unsure.")
    if not grace >= 0:
        raise ValueError(f"`grace` must be at least 0 seconds, got {grace}. Use 0 to end the other ranks at once.")
    if last_lines < 0:
        raise ValueError(f"`last_lines` must be at least 0, got {last_lines}. Use 0 to quote no output.")


def _check_platform_and_caller() -> None:
    if os.name != "posix":
        raise RuntimeError(
            f"`run_processes` needs sessions and signals of a POSIX system, got {sys.platform}. Use WSL."
        )
    if _worker.IMPORTING in os.environ:
        raise RuntimeError(
            f"`run_processes` was called while rank {os.environ['RANK']} was importing the module of its function, "
            'which would start processes without end. Put the call under `if __name__ == "__main__":`.'
        )


def _build_environments(world_size: int, additions: Mapping[str, str | None]) -> list[dict[str, str]]:
    for name, value in additions.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"`env[{name!r}]` must be a string or None, got {value!r}. Use {str(value)!r}.")
    shared: dict[str, str | None] = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    by_rank = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **additions} for rank in range(world_size)]
    return [{name: value for name, value in one.items() if value is not None} for one in by_rank]


def _choose_start(preload: Sequence[str], timeout: float) -> Start:
    if not preload or sys.platform != "linux":
        return Started
    return template_for(tuple(preload), timeout).fork


def _run_ranks(
    start: Start, folder: Path, call: bytes, environments: list[dict[str, str]], deadline: float, grace: float
) -> list[Rank]:
    """Start all ranks and return when they have ended or have been killed."""
    call_file = folder / "call"
    call_file.write_bytes(call)
    ranks: list[Rank] = []
    with _open_lifeline() as lifeline:
        try:
            for rank, environment in enumerate(environments):
                ranks.append(Rank(rank, start, call_file, folder / f"rank{rank}", environment, lifeline))
            _wait(ranks, deadline, grace)
            collect_stacks(ranks)
        finally:
            kill_sessions(rank.process for rank in ranks)
    return ranks


@contextmanager
def _open_lifeline() -> Iterator[int]:
    """A pipe of which we alone hold the writing end, so that reading it ends when we do, however that happens."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _wait(ranks: list[Rank], deadline: float, grace: float) -> None:
    """Return when all ranks have ended, when the limit passes, or `grace` seconds after the first failure."""
    while any(rank.exit_code is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL)
        for rank in ranks:
            rank.poll()
        deadline = min([deadline, *(rank.failure.time + grace for rank in ranks if rank.failure)])


def _forward_output(ranks: list[Rank]) -> None:
    """Print what the ranks printed; here, and not as it comes, so that pytest files it under the right test."""
    for rank in ranks:
        for line in rank.read_lines():
            print(f"[rank {rank.rank}] {line}")


def _read_result(rank: Rank) -> object:
    try:
        return unpack_result(rank.read_result())
    except Exception as error:
        raise RankError(
            f"rank {rank.rank} returned a value that cannot be unpickled here ({type(error).__name__}: {error}). "
            "Return numbers, strings, tensors or other plain data."
        ) from error

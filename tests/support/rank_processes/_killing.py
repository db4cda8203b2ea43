"""Ending the processes of all ranks and whatever they started."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from tests.support.rank_processes._process import Process

_KILL_WAIT = 5.0  # seconds; only a process in an uninterruptible system call takes longer to die
_KILL_POLL = 0.01


def kill_sessions(leaders: Iterable[Process]) -> None:
    """Kill all processes of the sessions that `leaders` lead, and return when they are gone.

    Args:
        leaders: Unreaped session leaders, running, stopped or ended. They are reaped.
    """
    leaders = list(leaders)
    for leader in leaders:
        # PermissionError: what macOS answers when only a zombie is left.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_WAIT
    sessions = {leader.pid for leader in leaders}
    # The session may hold more groups (job control of a shell), and a killed process does not vanish at once.
    while (members := list(_find_members(sessions))) and time.monotonic() < deadline:
        for pid in members:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_POLL)
    for leader in leaders:
        leader.reap(max(_KILL_POLL, deadline - time.monotonic()))


def _find_members(sessions: set[int]) -> Iterator[int]:
    """The living processes of some sessions (Linux; none where there is no `/proc`)."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # pid (name) state parent group session ...; the name may hold blanks and brackets.
            state, _, _, session = file.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(session) in sessions and state not in "ZX":
                yield int(file.parent.name)

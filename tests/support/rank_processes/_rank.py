"""One rank: its process and files, how it ended, and its Python stack."""

import json
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.rank_processes._process import Start

_STACK_WAIT = 2.0  # seconds that living ranks get to write their stacks
_STACK_POLL = 0.1


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank did not return a result, and when (`time.monotonic`)."""

    summary: str
    time: float
    traceback: str = ""


class Rank:
    """A process that runs the function, in a session of its own so that whatever it starts can be found and killed."""

    def __init__(
        self,
        rank: int,
        start: Start,
        call_file: Path,
        folder: Path,
        environment: Mapping[str, str],
        lifeline: int,
    ) -> None:
        self.rank = rank
        self.failure: Failure | None = None
        self.exit_code: int | None = None
        self.has_returned = False
        self._folder = folder
        self._seen_alive = time.monotonic()
        self.missing_stack = ""
        folder.mkdir()
        with (folder / "output").open("wb") as output:
            self.process = start(call_file, folder, environment, lifeline, output.fileno())

    def read_result(self) -> bytes:
        """The pickled result."""
        return (self._folder / "result").read_bytes()

    def read_lines(self) -> Iterator[str]:
        """The lines that were written to stdout and stderr."""
        with (self._folder / "output").open(encoding="utf-8", errors="replace") as output:
            for line in output:
                yield line.rstrip("\n")

    def read_last_lines(self, count: int) -> list[str]:
        """The last `count` of the lines."""
        return list(deque(self.read_lines(), maxlen=count))

    def poll(self) -> None:
        """Notice that the function returned or failed, and that the process ended; often in that order."""
        if self.exit_code is None:
            now = time.monotonic()
            self.exit_code = self.process.poll()
            if self.exit_code is None:
                self._seen_alive = now
        self.has_returned = (self._folder / "result").exists()
        if self.failure is None:
            self.failure = self._find_failure()

    def _find_failure(self) -> Failure | None:
        report = self._folder / "failure"
        if report.exists():
            return Failure(**json.loads(report.read_text()))
        if self.exit_code is None or (self.exit_code == 0 and self.has_returned):
            return None
        # Dated back to when it was last seen alive: others fail a moment after a peer vanished, and they do say when.
        return Failure(_describe_exit(self.exit_code, self.has_returned), self._seen_alive)

    def request_stack(self) -> bool:
        """Ask the living process for the Python stacks of its threads, unless it cannot answer."""
        if self.process.is_stopped():
            self.missing_stack = "none: the process was stopped by a signal (SIGSTOP or the like)"
            return False
        # Before the file is there, nobody handles the signal, and it would end the process.
        if not (self._folder / "stack").exists():
            self.missing_stack = "none: the interpreter was still starting"
            return False
        self.missing_stack = f"none: the process did not answer within {_STACK_WAIT:g} s"
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGQUIT)
        return True

    def read_stack(self) -> str:
        """The stacks that were asked for, as far as they were written."""
        file = self._folder / "stack"
        text = file.read_text(errors="replace") if file.exists() else ""
        return "\n\n".join(
            # The thread that waits for the end of the parent is ours and says nothing.
            thread.strip("\n")
            for thread in text.split("\n\n")
            if "_end_with_parent" not in thread
        )


def collect_stacks(ranks: Sequence[Rank]) -> None:
    """Have all living ranks write their stacks, and wait until they have."""
    asked = [rank for rank in ranks if rank.exit_code is None and rank.request_stack()]
    before: list[str] = []
    deadline = time.monotonic() + _STACK_WAIT
    while asked and time.monotonic() < deadline:
        time.sleep(_STACK_POLL)
        stacks = [rank.read_stack() for rank in asked]
        # A stack is written line by line: it is complete when nothing was added since the last look.
        if all(stacks) and stacks == before:
            return
        before = stacks


def _describe_exit(code: int, has_returned: bool) -> str:
    names = {item.value: item.name for item in signal.Signals}
    how = f"exited with code {code}" if code >= 0 else f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"{how} {'after' if has_returned else 'before'} its function returned"

"""What the tests of `run_processes` share."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from . import rank_functions as ranks

SCRIPT_HEADER = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parents[2])!r}, {str(Path(ranks.__file__).parent)!r}]
from tests.support.rank_processes import run_processes
"""


@contextmanager
def raises_with(error_type: type[Exception], *patterns: str) -> Iterator[None]:
    """The error is raised and its message has matches for all patterns, in this order."""
    with pytest.raises(error_type) as caught:
        yield
    print(caught.value)
    assert re.search(".*?".join(patterns), str(caught.value), re.DOTALL), f"{patterns} not found in:\n{caught.value}"


def is_running(pid: int) -> bool:
    # In a container without an init process, an orphan that was killed stays a zombie.
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.01)


def read_pids(folder: Path) -> list[int]:
    return [int(pid) for file in folder.glob("*.pids") for pid in file.read_text().split()]


# Results

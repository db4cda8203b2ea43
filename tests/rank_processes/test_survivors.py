"""`run_processes` leaves no process behind, whatever becomes of the ranks and of the one that started them."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.rank_processes import RankTimeoutError, run_processes

from . import rank_functions as ranks
from .helpers import SCRIPT_HEADER, is_running, read_pids, wait_until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("kind_of_ranks")]


@pytest.mark.parametrize("new_group", [False, True])
def test_grandchildren_of_finished_ranks_are_killed(tmp_path: Path, new_group: bool) -> None:
    run_processes(ranks.record_pids, 2, tmp_path, new_group)
    pids = read_pids(tmp_path)
    assert len(pids) == 4
    assert not [pid for pid in pids if is_running(pid)]


def test_grandchildren_of_hanging_ranks_are_killed(tmp_path: Path) -> None:
    with pytest.raises(RankTimeoutError):
        run_processes(ranks.record_pids_and_hang, 2, tmp_path, timeout=4)
    pids = read_pids(tmp_path)
    assert len(pids) == 4
    assert not [pid for pid in pids if is_running(pid)]


def test_keyboard_interrupt_kills_everything(tmp_path: Path) -> None:
    alive: list[bool] = []

    def interrupt() -> None:
        wait_until(lambda: len(read_pids(tmp_path)) == 4)
        alive.extend(is_running(pid) for pid in read_pids(tmp_path))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_processes(ranks.record_pids_and_hang, 2, tmp_path, timeout=20)
    thread.join()
    assert alive == [True] * 4
    assert not [pid for pid in read_pids(tmp_path) if is_running(pid)]


def test_ranks_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT_HEADER + "import pathlib, rank_functions\n"
        f"run_processes(rank_functions.record_pids_and_hang, 2, pathlib.Path({str(tmp_path)!r}), timeout=100)\n"
    )
    # What a killed parent cannot clean up goes with the folder of this test.
    with subprocess.Popen([sys.executable, str(script)], env={**os.environ, "TMPDIR": str(tmp_path)}) as parent:
        wait_until(lambda: len(read_pids(tmp_path)) == 4)
        pids = read_pids(tmp_path)
        assert all(is_running(pid) for pid in pids)
        parent.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids), seconds=5)

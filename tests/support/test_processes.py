"""`run_processes` returns the results of all ranks, or fails in bounded time and leaves no process behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support import processes
from tests.support.processes import RankError, RankTimeoutError, run_processes

pytestmark = pytest.mark.timeout(120)


@contextmanager
def raises_with(error_type, *patterns):
    """Expect an error whose message matches the patterns in this order."""
    with pytest.raises(error_type) as caught:
        yield
    assert re.search(".*?".join(patterns), str(caught.value), re.DOTALL), f"{patterns} not found in:\n{caught.value}"


def is_running(pid):
    # In a container without an init process, an orphan that was killed stays a zombie.
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.01)


def read_pids(folder):
    return [int(pid) for file in folder.glob("*.pids") for pid in file.read_text().split()]


def sleep_forever():
    while True:
        time.sleep(60)


def print_and_sum(offset):
    print("line", os.environ["RANK"])
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "ADDED", "REMOVED")
    return total.item(), os.getcwd(), [os.environ.get(name) for name in names]


def test_results_come_in_the_order_of_ranks(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("REMOVED", "x")
    monkeypatch.setenv("RANK", "9")
    monkeypatch.chdir(tmp_path)
    results = run_processes(print_and_sum, 2, offset=10, env={"ADDED": "y", "REMOVED": None})
    assert results == [(21, str(tmp_path), [str(rank), "2", "2", "1", "y", None]) for rank in range(2)]
    assert capsys.readouterr().out == "[rank 0] line 0\n[rank 1] line 1\n"
    assert run_processes(os.getenv, 1, "RANK", env={"RANK": None}) == [None]


def fail(how):
    if os.environ["RANK"] == "0":
        sleep_forever()
    print("last words")
    if how == "raise":
        threading.Thread(target=sleep_forever).start()  # keeps the process alive
        raise LookupError("no such batch")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "message"),
    [("raise", r"raised LookupError: no such batch\."), ("kill", "was killed by SIGKILL before its function returned")],
)
def test_a_failure_ends_all_ranks_and_is_the_headline(monkeypatch, how, message):
    monkeypatch.setattr(processes, "_GRACE", 0.5)
    with raises_with(RankError, f"^rank 1 of 2 {message}", "--- rank 0 not finished", "in sleep_forever", "last words"):
        run_processes(fail, 2, how, timeout=60)


def hang(folder):
    print("waiting")
    grandchild = subprocess.Popen(["sleep", "1000"])
    grandchild.returncode = 0  # otherwise Python warns that it still runs
    draft = folder / f"{os.environ['RANK']}.draft"
    draft.write_text(f"{os.getpid()} {grandchild.pid}")
    draft.rename(draft.with_suffix(".pids"))
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "0":
        dist.barrier()
    sleep_forever()


def test_a_hang_ends_at_the_limit_with_stacks_and_last_lines_and_leaves_no_process(tmp_path):
    patterns = ["--- rank 0 not finished", "in barrier", "in hang", "waiting", "--- rank 1", "in sleep_forever"]
    with raises_with(RankTimeoutError, "^rank 0, rank 1 did not finish within `timeout`=3 seconds", *patterns):
        run_processes(hang, 2, tmp_path, timeout=3)
    assert len(read_pids(tmp_path)) == 4
    assert not [pid for pid in read_pids(tmp_path) if is_running(pid)]


@pytest.mark.slow
def test_ranks_and_the_template_end_when_the_caller_is_killed(tmp_path):
    program = f"""
import pathlib
from tests.support.processes import run_processes
from tests.support.test_processes import hang
if __name__ == "__main__":
    run_processes(hang, 2, pathlib.Path({str(tmp_path)!r}))
"""
    (tmp_path / "program.py").write_text(program)
    root = Path(__file__).parents[2]
    # The caller cannot remove its temporary folder, so it is put into the folder of this test.
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(root)}
    with subprocess.Popen([sys.executable, str(tmp_path / "program.py")], env=environment, cwd=root) as caller:
        wait_until(lambda: len(read_pids(tmp_path)) == 4, seconds=60)
        pids = read_pids(tmp_path) + [child.pid for child in psutil.Process(caller.pid).children(recursive=True)]
        assert len(pids) > 4
        caller.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids), seconds=30)

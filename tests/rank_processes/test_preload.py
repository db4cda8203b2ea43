"""Ranks that find modules imported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.rank_processes import RankTimeoutError, run_processes

from . import rank_functions as ranks
from .helpers import SCRIPT_HEADER, is_running, wait_until

pytestmark = pytest.mark.timeout(120)


def test_modules_are_imported_once_and_for_all_ranks() -> None:
    calls = [run_processes(ranks.collect_origin, 2, preload=("torch",), timeout=100) for _ in range(2)]
    parents = {parent for call in calls for parent, _ in call}
    assert len(parents) == 1
    assert parents != {os.getpid()}
    assert all("torch" in modules for call in calls for _, modules in call)
    ((parent, modules),) = run_processes(ranks.collect_origin, 1)
    assert (parent, "torch" in modules) == (os.getpid(), False)


def test_ranks_have_the_environment_and_the_folder_of_their_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("first", "second"):
        monkeypatch.setenv("CHANGED", value)
        (folder := tmp_path / value).mkdir()
        monkeypatch.chdir(folder)
        (environment,) = run_processes(ranks.collect_environment, 1, preload=("json",), env={"ADDED": "x"})
        assert (environment["CHANGED"], environment["ADDED"]) == (value, "x")
        assert run_processes(os.getcwd, 1, preload=("json",)) == [str(folder)]


def test_ranks_draw_random_numbers_of_their_own() -> None:
    drawn = run_processes(ranks.draw, 3, preload=("numpy",), timeout=100)
    assert len({number for number, _ in drawn}) == len({number for _, number in drawn}) == 3


def test_nothing_is_left_at_the_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT_HEADER + "import rank_functions\nrun_processes(rank_functions.rank, 1, preload=('json',))\n"
    )
    command = [sys.executable, "-W", "error::ResourceWarning", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ImportError, match=r"`preload` cannot be imported: \('nowhere',\)(?s:.*)No module named"):
        run_processes(ranks.rank, 1, preload=("nowhere",))


def test_importing_counts_for_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"`preload` cannot be imported(?s:.*)not done within `timeout`=2 seconds"):
        run_processes(ranks.rank, 1, preload=("slow_to_import",), timeout=2)


def test_a_module_that_exits_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"`preload` cannot be imported(?s:.*)SystemExit: 3"):
        run_processes(ranks.rank, 1, preload=("exits",))


def test_the_process_that_forks_ranks_is_started_again_when_it_has_died() -> None:
    ((parent, _),) = run_processes(ranks.collect_origin, 1, preload=("json",))
    os.kill(parent, signal.SIGKILL)
    wait_until(lambda: not is_running(parent))
    ((other, _),) = run_processes(ranks.collect_origin, 1, preload=("json",))
    assert other not in (parent, os.getpid())


def test_ranks_that_were_forked_a_moment_ago_are_killed() -> None:
    for _ in range(20):
        with pytest.raises(RankTimeoutError):
            run_processes(ranks.sleep_forever, 3, preload=("json",), timeout=0.001)


def test_the_process_that_forks_ranks_ends_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT_HEADER + "import os, pathlib, time, rank_functions\n"
        "((parent, _),) = run_processes(rank_functions.collect_origin, 1, preload=('json',))\n"
        f"pathlib.Path({str(tmp_path)!r}, 'parent').write_text(str(parent))\n"
        "time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, str(script)]) as process:
        wait_until(lambda: bool((tmp_path / "parent").exists() and (tmp_path / "parent").read_text()))
        parent = int((tmp_path / "parent").read_text())
        assert psutil.Process(parent).ppid() == process.pid
        process.kill()
    wait_until(lambda: not is_running(parent), seconds=5)

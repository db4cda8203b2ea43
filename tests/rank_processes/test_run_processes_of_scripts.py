"""Functions of scripts, sessions and test modules reach the ranks, or are refused with a remedy."""

import subprocess
import sys
from pathlib import Path

import pytest

from .helpers import SCRIPT_HEADER

pytestmark = pytest.mark.timeout(120)


def run_script(folder: Path, text: str, *command: str) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(SCRIPT_HEADER + text)
    return subprocess.run(
        [sys.executable, *(command or ["script.py"])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SCRIPT = """
class Result(int):
    pass

def double(value):
    return Result(2 * value)

if __name__ == "__main__":
    results = run_processes(double, 2, 21)
    print(results, type(results[0]) is Result)
"""


@pytest.mark.parametrize("command", [["script.py"], ["-m", "script"]], ids=" ".join)
def test_function_and_class_of_a_script_work(tmp_path: Path, command: list[str]) -> None:
    assert run_script(tmp_path, SCRIPT, *command).stdout == "[42, 42] True\n"


def test_script_without_main_guard_is_told_so(tmp_path: Path) -> None:
    script = run_script(tmp_path, "def one():\n    return 1\nrun_processes(one, 1)\n")
    assert "`run_processes` was called while rank 0 was importing the module of its function" in script.stderr
    assert 'under `if __name__ == "__main__":`' in script.stderr


def test_function_of_an_interactive_session_is_refused(tmp_path: Path) -> None:
    session = run_script(tmp_path, "", "-c", SCRIPT_HEADER + "def one():\n    return 1\nrun_processes(one, 1)\n")
    assert "TypeError: `function` or one of its arguments is defined in an interactive session" in session.stderr

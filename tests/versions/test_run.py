"""The command that runs on several versions of torch, with short checks instead of tests."""

import shutil
import subprocess
import sys

import pytest
import torch

from tests.versions import run
from tests.versions.cuda_stand_ins import add_stand_ins

OWN = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture(autouse=True)
def _this_environment(monkeypatch):
    monkeypatch.setattr(run, "prepare", lambda version: sys.executable)
    monkeypatch.setattr(run, "torch_version", lambda python: torch.__version__)


def test_the_exit_code_and_the_table_say_whether_all_checks_have_passed(monkeypatch, capsys):
    monkeypatch.setattr(run, "_LIMIT", 3)
    for program, code, word in (
        ("pass", 0, "passed"),
        ("raise SystemExit(3)", 1, "FAILED"),
        ("import time; time.sleep(60)", 1, "FAILED"),
    ):
        monkeypatch.setattr(run, "CHECKS", {"first": ["-c", "pass"], "second": ["-c", program]})
        assert run.main([OWN]) == code
        printed = capsys.readouterr().out
        head, row = printed.splitlines()[-2:]
        assert head.split() == ["torch", "first", "second", "all"]
        assert row.startswith(f"{torch.__version__}  passed ")
        assert row.split()[4] == word
    assert "timed out after 3 seconds" in printed


def test_an_environment_of_another_version_is_refused():
    with pytest.raises(RuntimeError, match=r"the environment of torch 2\.1 imports torch"):
        run.main(["2.1"])


def test_pages_state_the_range_of_versions_that_is_required():
    first, *_, last = versions = run.supported_versions()
    assert OWN in versions
    for page in ("README.md", "docs/index.md"):
        assert f"torch {first} to {last}" in " ".join((run.ROOT / page).read_text().split()), page


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_library_loads_with_a_stand_in_for_one_that_is_missing(tmp_path):
    def build(name, source, *options):
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", name, *options]
        subprocess.run(command, input=source, text=True, check=True, cwd=tmp_path)

    (tmp_path / "versions").write_text("library.1 { global: cuStart; };\n")
    build("libmissing.so.1", "int cuStart(void) { return 0; }", "-Wl,-soname,libmissing.so.1,--version-script=versions")
    user = "int cuStart(void); int use(void) { return cuStart(); }"
    build("libuser.so", user, "-x", "none", "libmissing.so.1", "-Wl,-rpath,$ORIGIN")
    (tmp_path / "libmissing.so.1").unlink()
    load = [sys.executable, "-c", "import ctypes; print(ctypes.CDLL('./libuser.so').use())"]
    assert subprocess.run(load, cwd=tmp_path, capture_output=True, check=False).returncode != 0
    assert add_stand_ins(tmp_path) == ["libmissing.so.1"]
    assert subprocess.run(load, cwd=tmp_path, capture_output=True, check=True, text=True).stdout == "100\n"

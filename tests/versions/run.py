"""Run what depends on versions of other packages on combinations of them: `python -m tests.versions.run [ROW ...]`.

Without arguments it runs all rows of `ROWS`; `ci` stands for the rows that every change runs, on the Python that runs
this where the machine lacks that of a row. Rows that pass are written into the table of `docs/installation.md`. The
environment of a row, about 2 GB, stays in
`~/.cache/lightning_ddp_ext/versions` until its requirements change; `XDG_CACHE_HOME` moves that folder. It has torch
without the CUDA libraries that it depends on, which needs gcc and readelf.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tests.versions import cuda_stand_ins
from tests.versions.second_name import translated_checkout

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "installation.md"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_ddp_ext" / "versions"

FIRST, SECOND = "lightning.pytorch", "pytorch_lightning"  # Lightning's import names


@dataclass(frozen=True)
class Row:
    """Versions that go together, and the import names of Lightning that are installed and tested."""

    python: str
    torch: str
    lightning: str
    torchmetrics: str
    names: tuple[str, ...] = (FIRST, SECOND)


# By the minor version of torch. The first row has the lowest versions that `pyproject.toml` allows.
ROWS = {
    "2.6": Row("3.10", "2.6.0", "2.5.0", "1.4.0"),
    "2.7": Row("3.11", "2.7.1", "2.5.2", "1.6.0", (FIRST,)),
    "2.8": Row("3.11", "2.8.0", "2.5.6", "1.7.4"),
    "2.9": Row("3.12", "2.9.1", "2.6.0", "1.8.0", (FIRST,)),
    "2.10": Row("3.12", "2.10.0", "2.6.0", "1.8.2", (SECOND,)),
    "2.11": Row("3.13", "2.11.0", "2.6.1", "1.9.0", (FIRST,)),
    "2.12": Row("3.12", "2.12.1", "2.6.5", "1.9.0"),
    "2.13": Row("3.11", "2.13.0", "2.6.6", "1.9.0"),
    "2.14": Row("3.13", "2.14.1", "2.6.6", "1.9.0"),
    "2.15": Row("3.13", "2.15.0", "2.6.6", "1.9.0"),
}
_FIRST_ROW = next(iter(ROWS.values()))
CI_ROWS = ["2.6", "2.10", "2.15"]

_TOOLS = ["pytest", "pytest-timeout", "hypothesis", "attrs"]
_OF_TOOLS = re.compile(rf"({'|'.join(_TOOLS)}|numpy)==")
_LOWER = re.compile(r'^ +"([a-z-]+)>=([\d.]+)', re.MULTILINE)  # lines of `dependencies` in pyproject.toml
_CUDA = re.compile(r"^Requires-Dist: (?:nvidia|triton|cuda|pytorch-triton).*\n", re.MULTILINE)

_PREPARED_AT_ONCE = 2  # environments: one is downloaded while another is unpacked
_LIMIT = 900  # seconds for the tests of one import name
_SHOWN = 6000  # characters of the output of tests that failed
TESTS = [
    "tests/compat/test_lightning.py",
    "tests/compat/test_torch.py",
    "tests/compat/test_torchmetrics.py",
    "tests/compat/test_private_names.py::test_classes_do_not_use_private_names_of_their_bases",
    "tests/steps/test_active_collectives_integration.py",
    "tests/resume/test_loading.py",
    "tests/strategies/test_balanced_dp_gradients.py",
    "tests/verification/test_verify.py",
    "tests/strategies/test_balanced_ddp.py::test_any_number_of_ranks_trains_as_one_process[2-False]",
    "tests/parity/test_parity.py",
    "tests/test_documentation.py::test_the_readmes_program_prints_what_it_says",
    "tests/test_documentation.py::test_an_example_on_two_ranks_prints_that_they_agree_with_each_other_and_with_one_process"
    "[exact_evaluation]",
    "tests/test_documentation.py::test_an_example_on_two_ranks_prints_that_they_agree_with_each_other_and_with_one_process"
    "[multi_task_checkpointing]",
]


def lower_bounds() -> dict[str, str]:
    """Return the lowest version of each dependency that `pyproject.toml` allows."""
    dependencies = re.search(r"\ndependencies = \[\n(.*?)\n\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL)
    found = dict(_LOWER.findall(dependencies[1])) if dependencies else {}
    if "torch" not in found:
        raise ValueError("`pyproject.toml` has no lines of the form `torch>=VERSION` in `dependencies`. Write it so.")
    return found


def supported_versions() -> list[str]:
    """Return the minor versions of torch in the range of `pyproject.toml`, such as "2.11"."""
    found = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    if found is None:
        raise ValueError("`pyproject.toml` has no range of the form `torch>=2.a,<2.b`. Write it so, or change this.")
    return [f"2.{minor}" for minor in range(int(found[1]), int(found[2]))]


def requirements(row: Row) -> list[str]:
    """Return what an environment has besides torch; the first row has the lower bounds of all dependencies."""
    lightning = [f"{name.partition('.')[0].replace('_', '-')}=={row.lightning}" for name in row.names]
    lightning += [f"pytorch-lightning=={row.lightning}"] if FIRST in row.names else []  # its newest one otherwise
    others = {
        name: bound for name, bound in lower_bounds().items() if name not in ("torch", "lightning", "torchmetrics")
    }
    pinned = [f"{name}{'==' if row.torch == _FIRST_ROW.torch else '>='}{bound}" for name, bound in others.items()]
    return [*dict.fromkeys(lightning), f"torchmetrics=={row.torchmetrics}", *pinned, *_TOOLS]


def tool_constraints() -> list[str]:
    """Return the lines of `constraints.txt` for the tools; what a row requires chooses all other packages."""
    return [line for line in (ROOT / "constraints.txt").read_text().splitlines() if _OF_TOOLS.match(line)]


def folder_of(row: Row) -> Path:
    """Return the folder of a row's environment, which its content names."""
    content = "\n".join([*requirements(row), *tool_constraints(), cuda_stand_ins.SOURCE])
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    return CACHE / f"python-{row.python}-torch-{row.torch}-{digest}"


def prepare(row: Row, interpreter: str) -> Path:
    """Return the interpreter of a row's environment; makes the environment if there is none with this content."""
    folder = folder_of(row)
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", folder], check=True)
    limits = folder / "constraints.txt"
    limits.write_text("\n".join(tool_constraints()))
    # The variable takes the place of constraints in pip's configuration, which could exclude the versions of a row; an
    # index or a certificate set there remains.
    environment = {**os.environ, "PIP_CONSTRAINT": str(limits)}
    # The tests compile what they import, a small part of torch.
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "--no-deps", f"torch=={row.torch}"], check=True, env=environment)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    metadata = next(site_packages.glob("torch-*.dist-info/METADATA"))
    metadata.write_text(_CUDA.sub("", metadata.read_text()))  # pip would install them with the next package
    cuda_stand_ins.add_stand_ins(site_packages / "torch" / "lib")
    subprocess.run([*pip, "torch", *requirements(row)], check=True, env=environment)
    complete.touch()
    return python


def find_interpreters(rows: Sequence[Row], may_replace: bool) -> list[tuple[Row, str]]:
    """Return rows with their interpreters; a Python that this machine lacks is replaced by this one, or an error."""
    found = {version: find_interpreter(version) for version in sorted({row.python for row in rows})}
    missing = [version for version, interpreter in found.items() if not interpreter]
    if missing and not may_replace:
        commands = ", ".join(f"`python{version}`" for version in missing)
        raise FileNotFoundError(
            f"rows of {', '.join(missing)} need the commands {commands}, which are not on `PATH` or in `~/.pyenv`."
            f" Install them, for example with `uv python install {' '.join(missing)}`, or choose other rows."
        )
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    for version in missing:
        print(f"This machine has no Python {version}: its rows run on {own}.", flush=True)
    return [
        (row, interpreter) if (interpreter := found[row.python]) else (replace(row, python=own), sys.executable)
        for row in rows
    ]


def find_interpreter(version: str) -> str | None:
    """Return an interpreter of a minor version of Python, or None."""
    candidates = [
        sys.executable,
        f"python{version}",
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ]
    for candidate in candidates:
        command = [candidate, "-c", "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            continue
        if found == version:
            return candidate
    return None


def installed(python: Path) -> list[str]:
    """Return the versions that an environment imports: Python, torch, Lightning and torchmetrics."""
    script = (
        "import platform, torch, torchmetrics; from importlib.metadata import version;"
        "print(platform.python_version(), torch.__version__.partition('+')[0], version('pytorch-lightning'),"
        " torchmetrics.__version__)"
    )
    return subprocess.run([python, "-c", script], check=True, stdout=subprocess.PIPE, text=True).stdout.split()


@contextmanager
def checkout(name: str) -> Iterator[Path]:
    """Provide a checkout whose tests import Lightning by a name."""
    if name == FIRST:
        yield ROOT
    else:
        with translated_checkout() as folder:
            yield folder


def run_tests(python: Path, name: str) -> str:
    """Run the tests under one import name; prints the output if they fail, and returns pytest's last line."""
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-m", "not slow and not exhaustive"]
    with checkout(name) as folder:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile torch
        try:
            done = subprocess.run(
                [python, "-m", "pytest", *options, *TESTS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                cwd=folder, env=environment, timeout=_LIMIT,
            )  # fmt: skip
            output, has_passed = done.stdout, done.returncode == 0
        except subprocess.TimeoutExpired as error:
            output, has_passed = f"{error}\n", False
    if not has_passed:
        print(f"== {name}\n{output[-_SHOWN:]}", flush=True)
    summary = re.search(r"(\d+ passed).* in ([\d.]+)s", output.splitlines()[-1])
    return f"{summary[1]} in {float(summary[2]):.0f} s" if has_passed and summary else "FAILED"


def describe(row: Row) -> str:
    """Return the row's line in the table of tested versions."""
    names = ", ".join(f"`{name}`" for name in row.names)
    return f"| {row.python} | {row.torch} | {row.lightning} | {row.torchmetrics} | {names} |"


def record(tested: Row, has_passed: bool) -> None:
    """Write the table of tested versions, with a row that has been tested now only if it has passed."""
    begin, end = (f"<!-- tested versions: {word} -->" for word in ("begin", "end"))
    before, rest = PAGE.read_text().split(begin)
    recorded, after = rest.split(end)
    lines = ["| Python | torch | Lightning | torchmetrics | imported as |", "| --- | --- | --- | --- | --- |"]
    lines += [describe(row) for row in ROWS.values() if (has_passed if row is tested else describe(row) in recorded)]
    PAGE.write_text("\n".join([f"{before}{begin}", "", *lines, "", f"{end}{after}"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests of the chosen rows and print a table; returns 0 if all have passed, otherwise 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", help=f"any of {', '.join(ROWS)}, or ci; by default all of them")
    given = parser.parse_args(arguments).rows
    chosen = CI_ROWS if given == ["ci"] else given or list(ROWS)
    if unknown := sorted(set(chosen) - ROWS.keys()):
        parser.error(f"no rows {', '.join(unknown)}; there are {', '.join(ROWS)}")
    try:
        chosen_rows = find_interpreters([ROWS[name] for name in chosen], may_replace=given == ["ci"])
    except FileNotFoundError as error:
        parser.error(str(error))
    started = time.monotonic()
    with ThreadPoolExecutor(_PREPARED_AT_ONCE) as pool:
        environments = list(pool.map(prepare, *zip(*chosen_rows, strict=True)))
    print(f"environments: {time.monotonic() - started:.0f} s", flush=True)
    results = [["Python", "torch", "Lightning", "torchmetrics", FIRST, SECOND, "all"]]
    for (row, _), python in zip(chosen_rows, environments, strict=True):
        started = time.monotonic()
        found = installed(python)
        expected = [row.python, row.torch, row.lightning, row.torchmetrics]
        if [found[0].rpartition(".")[0], *found[1:]] != expected:
            raise RuntimeError(f"the environment {python.parents[1]} has {found}, not {expected}. Delete it.")
        print(f"Python {found[0]}, torch {row.torch}, Lightning {row.lightning}", flush=True)
        with ThreadPoolExecutor(len(row.names)) as pool:  # a process each, on two cores
            by_name = dict(zip(row.names, pool.map(partial(run_tests, python), row.names), strict=True))
        passed = [by_name.get(name, "-") for name in (FIRST, SECOND)]
        record(row, "FAILED" not in passed)
        results.append([*found, *passed, f"{time.monotonic() - started:.0f} s"])
    widths = [max(map(len, column)) for column in zip(*results, strict=True)]
    for line in results:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return int(any("FAILED" in line for line in results))


if __name__ == "__main__":
    sys.exit(main())

"""Run what depends on the version of torch on several versions: `python -m tests.versions.run [VERSION ...]`.

Without arguments it runs on all versions that `pyproject.toml` allows. Each has an environment in the folder
`.venv-torch-VERSION` of the checkout, about 1.2 GB, which stays for later runs: torch from pip's indices, without the
CUDA libraries that it depends on; all other packages are those of this interpreter. Needs gcc and readelf.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from tests.versions.cuda_stand_ins import add_stand_ins

ROOT = Path(__file__).parents[2]
_LIMIT = 900  # seconds for a check
_SHOWN = 6000  # characters of the output of a check that failed
_PYTEST = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "not slow and not exhaustive"]

CHECKS: dict[str, list[str]] = {
    "import": ["-c", "import lightning_ddp_ext"],
    "private names": [*_PYTEST, "tests/compat"],
    "uneven phase": [*_PYTEST, "tests/join/test_active_ranks_integration.py"],
    "parity": [
        *_PYTEST,
        "tests/strategies/test_balanced_dp_gradients.py",
        "tests/strategies/test_ddp_checkpoint_integration.py",
        "tests/strategies/test_ddp_join_integration.py",
    ],
    "README": [*_PYTEST, "tests/test_documentation.py::test_the_readmes_program_prints_what_it_says"],
}


def supported_versions() -> list[str]:
    """Return the minor versions of torch in the range of `pyproject.toml`, such as "2.11"."""
    found = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    if found is None:
        raise ValueError("`pyproject.toml` has no range of the form `torch>=2.a,<2.b`. Write it so, or change this.")
    return [f"2.{minor}" for minor in range(int(found[1]), int(found[2]))]


def prepare(version: str) -> Path:
    """Return the interpreter of an environment with a version of torch; makes the environment if there is none."""
    folder = ROOT / f".venv-torch-{version}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", f"torch=={version}.*"], check=True)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    add_stand_ins(site_packages / "torch" / "lib")
    # Behind the folder of this environment, so that its torch is the one that is imported.
    (site_packages / "other_packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    complete.touch()
    return python


def torch_version(python: Path) -> str:
    """Return the version that an interpreter imports."""
    command = [python, "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def run_checks(python: Path) -> list[str]:
    """Run all checks with an interpreter; prints the output of those that fail, and returns a word for each."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    results = []
    for name, arguments in CHECKS.items():
        started = time.monotonic()
        try:
            done = subprocess.run(
                [python, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                env=environment, timeout=_LIMIT,
            )  # fmt: skip
            output, has_passed = done.stdout, done.returncode == 0
        except subprocess.TimeoutExpired as error:
            output, has_passed = f"{error}\n", False
        seconds = time.monotonic() - started
        results.append(f"{'passed' if has_passed else 'FAILED'} {seconds:.0f} s")
        if not has_passed:
            print(f"== {name}\n{output[-_SHOWN:]}", flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks on all versions and print a table; returns 0 if all have passed, otherwise 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", help='such as "2.11"; by default those of `pyproject.toml`')
    rows = [["torch", *CHECKS, "all"]]
    for version in parser.parse_args(arguments).versions or supported_versions():
        python = prepare(version)
        imported = torch_version(python)
        if not imported.startswith(f"{version}."):
            raise RuntimeError(f"the environment of torch {version} imports torch {imported}. Delete it and run again.")
        print(f"torch {imported}", flush=True)
        started = time.monotonic()
        rows.append([imported, *run_checks(python), f"{time.monotonic() - started:.0f} s"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return int(any("FAILED" in cell for row in rows for cell in row))


if __name__ == "__main__":
    sys.exit(main())

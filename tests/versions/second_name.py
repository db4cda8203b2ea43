"""Run some tests under `pytorch_lightning`: `python -m tests.versions.second_name [ARGUMENTS OF PYTEST]`.

The tests import `lightning.pytorch`. They are copied with the other name, also in the programs that they start. There,
`lightning` cannot be imported, as where only `pytorch-lightning` is installed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_ddp_ext._import_names import FABRICS, FIRST, SECOND

ROOT = Path(__file__).parents[2]
_COPIED = ("README.md", "benchmarks", "conf", "docs", "examples", "pyproject.toml", "tests")
# What depends on names that Lightning gives: one training or more of each strategy, callbacks, loaders and the command.
_TESTS = (
    "tests/callbacks", "tests/compat", "tests/fabric", "tests/loaders", "tests/resume", "tests/cli/test_train.py",
    "tests/strategies/test_every_strategy.py", "tests/strategies/test_balanced_ddp.py",
    "tests/strategies/test_balanced_dp_runs.py", "tests/strategies/test_ddp_join_training.py",
    "tests/parity", "tests/strategies/test_starting.py", "tests/test_output.py",
)  # fmt: skip
# About the names of the sources, which are not translated, and files that are not copied or have longer lines then;
# tests/test_import_names.py is about both names.
_SKIPPED = (
    "tests/test_import_names.py",
    "tests/test_public_api.py::test_public_names_are_these",
    "tests/test_documentation.py::test_the_examples_of_docstrings_are_true",
    "tests/test_documentation.py::test_the_conda_recipe_has_the_version_and_the_bounds_of_the_package",
    "tests/test_documentation.py::test_programs_of_pages_fit_into_the_column",
)
_TRANSLATED = {".py", ".md", ".toml", ".yaml"}

_WITHOUT_LIGHTNING = """
import sys
from importlib.machinery import PathFinder


class WithoutLightning(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] == "lightning" else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutLightning
"""


def translate(text: str) -> str:
    """Return a text with the second name of Lightning, on the same lines."""
    return text.replace(FIRST, SECOND).replace(FABRICS[FIRST], FABRICS[SECOND])


@contextmanager
def translated_checkout() -> Iterator[Path]:
    """Provide a folder with the translated tests, all that they read, and a link to the package."""
    with tempfile.TemporaryDirectory(prefix="second_name_") as name:
        folder = Path(name)
        for part in _COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        for path in folder.rglob("*"):
            if path.suffix in _TRANSLATED:
                path.write_text(translate(path.read_text()))
        (folder / "lightning_ddp_ext").symlink_to(ROOT / "lightning_ddp_ext")
        (folder / "sitecustomize.py").write_text(_WITHOUT_LIGHTNING)
        yield folder


def main(arguments: list[str]) -> int:
    """Run pytest on a translated copy of the tests; returns its exit code."""
    with translated_checkout() as folder:
        skipped = (f"--deselect={test}" for test in _SKIPPED)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *skipped, *_TESTS, *arguments]
        return subprocess.call(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""All checks of a machine with a GPU: `python -m tests.gpu.kit [PART ...]` adds them to one result and one page."""

import argparse
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu.recording import VARIABLE

ROOT = Path(__file__).parents[2]
LIMIT = 470  # seconds for a part
_FOLDERS = (
    "strategies", "replicas", "reducer", "callbacks", "join", "models", "activation_checkpointing", "consistency"
)  # fmt: skip
_CHOSEN = {"parity": "not gpu and not slow and not exhaustive"}  # the other parts run tests marked `gpu`
_WARNINGS = (
    "ignore::pytest.PytestConfigWarning",  # settings of plug-ins that this Python lacks, and their markers
    "ignore::pytest.PytestUnknownMarkWarning",
    "ignore:This process (pid=:DeprecationWarning",  # Python 3.12 on workers of loaders, which torch forks
)

Result = dict[str, Any]


def parity_files() -> list[str]:
    """List the test files that run on any device, those that take longest first."""
    files = [path for folder in _FOLDERS for path in (ROOT / "tests" / folder).glob("test_*.py")]
    launching = {path for path in files if "run_processes" in path.read_text()}
    return [str(path.relative_to(ROOT)) for path in sorted(files, key=lambda path: (path not in launching, path))]


def feature_files() -> list[str]:
    """List the tests of what only a real device shows, except those under sanitizers."""
    names = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    return [f"tests/gpu/{name}" for name in names if "sanitizer" not in name]


PARTS = {
    "parity": "The tests of strategies, replicas, reducer, callbacks and models, in float64 on the device.",
    "features": "What only a real device shows: NCCL, precision, memory, compiled modules, waits of the host.",
    "sanitizers": "One step of each strategy under CUDA's and torch's sanitizers.",
    "speed": "Time of a training step and memory of gradients, against `ddp` and one device.",
}


def run_part(part: str, out: Path, accelerator: str, workers: int, chosen: str | None) -> Result:
    """Run a part within its time limit and return its results."""
    started = time.monotonic()
    if part == "speed":
        found = run_speed(out / part, accelerator)
    else:
        files = {"parity": parity_files, "features": feature_files}.get(
            part, lambda: ["tests/gpu/test_sanitizers.py"]
        )()
        found = run_tests(files, accelerator, workers, _CHOSEN.get(part, "gpu"), chosen)
    return {**found, "seconds": round(time.monotonic() - started), "date": _now()}


def run_tests(files: Sequence[str], accelerator: str, workers: int, marked: str, chosen: str | None) -> Result:
    """Run test files side by side, each in a process."""
    deadline = time.monotonic() + LIMIT
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:

        def run(number: int) -> list[Result]:
            record = Path(folder, str(number))
            arguments = [*_pytest(), f"--accelerator={accelerator}", "-m", marked, files[number]]
            arguments += ["-k", chosen] if chosen else []
            code, output = _run(arguments, deadline - time.monotonic(), {VARIABLE: str(record)})
            lines = record.read_text().splitlines() if record.exists() else []
            found: list[Result] = [json.loads(line) for line in lines]
            if code not in (0, 1, 5):  # 1: tests failed; 5: there are none
                ended = {None: f"did not end within {LIMIT} seconds", 4: "usage error"}.get(code, f"exit code {code}")
                found.append(
                    {"test": files[number], "outcome": "failed", "seconds": 0, "lines": [*output[-30:], ended]}
                )
            print(f"{files[number]}: {_count(found)}", flush=True)
            return found

        return {"tests": [result for found in pool.map(run, range(len(files))) for result in found]}


def run_speed(folder: Path, accelerator: str) -> Result:
    """Run the benchmark, whose results of each case stay in the folder if the time is not enough for all."""
    arguments = [str(ROOT / "benchmarks" / "gpu.py"), "--accelerator", accelerator, "--output", str(folder)]
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    code, output = _run(arguments, LIMIT, {"PYTHONPATH": _path("benchmarks")})
    outcome = "passed" if code == 0 else "failed"
    test = {"test": "benchmarks/gpu.py", "outcome": outcome, "lines": output[-30:]}
    return {"tests": [test], "speed": json.loads(results.read_text()) if results.exists() else {}}


def _pytest() -> list[str]:
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "tests.gpu.recording"]
    options += ["-o", "addopts="]  # not strict about settings and markers of plug-ins that this Python lacks
    return ["-m", "pytest", *options, *(part for warning in _WARNINGS for part in ("-W", warning))]


def _path(*folders: str) -> str:
    return os.pathsep.join([str(ROOT), *(str(ROOT / folder) for folder in folders), os.environ.get("PYTHONPATH", "")])


def _run(arguments: Sequence[str], limit: float, variables: dict[str, str]) -> tuple[int | None, list[str]]:
    """Run Python with a time limit; returns its exit code, None beyond the limit, and the lines of its output."""
    if limit <= 0:
        return None, ["not started"]
    environment = {**os.environ, "PYTHONPATH": _path(), **variables}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(limit)
        if code is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace").splitlines()


def update(part: Result, found: Result) -> Result:
    """Return a part with the new results of the tests that have run again."""
    again = {test["test"]: test for test in found["tests"]}
    return {**part, "tests": [again.get(test["test"], test) for test in part["tests"]], "date": found["date"]}


def describe_machine() -> dict[str, str]:
    """Return the machine and the versions of what runs on it."""
    import torch

    described = {
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
    }
    for package in ("torch", "lightning", "torchmetrics", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            described[package] = metadata.version(package)
    if torch.cuda.is_available():
        names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        described["GPU"] = ", ".join(f"{count} x {name}" for name, count in names.items())
        described["GPU memory"] = f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB"
        described["CUDA"] = str(torch.version.cuda)
        described["cuDNN"] = str(torch.backends.cudnn.version())
        with suppress(Exception):
            described["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        described["driver"] = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {name: value for name, value in described.items() if value}


def _first_line(*command: str) -> str:
    with suppress(OSError, IndexError, subprocess.TimeoutExpired):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=20)
        return done.stdout.splitlines()[0] if done.returncode == 0 else ""
    return ""


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _count(tests: Iterable[Result]) -> str:
    counts = Counter(test["outcome"] for test in tests)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if counts[outcome])


def make_page(result: Result) -> str:
    """Return the page of a result in Markdown."""
    return "\n".join(_page(result)) + "\n"


def _page(result: Result) -> Iterator[str]:
    yield from ("# Results on a GPU", "", "`make gpu` runs these checks and writes this page.", "")
    yield from ("| | |", "| --- | --- |")
    yield from (f"| {name} | {value} |" for name, value in result["machine"].items())
    yield from ("", "| part | result | seconds | date |", "| --- | --- | --- | --- |")
    for name, part in result["parts"].items():
        yield f"| {name} | {_count(part['tests'])} | {part['seconds']} | {part['date']} |"
    for name, part in result["parts"].items():
        yield from ("", f"## {name.capitalize()}", "", PARTS[name], "")
        if name == "speed":
            yield from part["speed"].get("page", [])
        else:
            yield from _tests_table(part["tests"], each=name != "parity")
        yield from _failures(part["tests"])


def _tests_table(tests: Sequence[Result], each: bool) -> Iterator[str]:
    """One row for each test, or for each file."""
    if each:
        yield from ("| test | result | measured |", "| --- | --- | --- |")
        for test in tests:
            file, _, name = test["test"].partition("::")
            measured = "; ".join(f"{what}: {value}" for what, value in test.get("values", {}).items())
            reason = test["lines"][-1] if test["outcome"] == "skipped" and test["lines"] else ""
            shown = (name or file).replace("test_", "", 1).replace("_", " ").replace("|", "\\|")
            yield f"| {shown} | {test['outcome']} | {_cell(measured or reason)} |"
        return
    yield from ("| file | result |", "| --- | --- |")
    for file in dict.fromkeys(test["test"].partition("::")[0] for test in tests):
        yield f"| `{file}` | {_count(test for test in tests if test['test'].partition('::')[0] == file)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def _failures(tests: Sequence[Result]) -> Iterator[str]:
    failed = [test for test in tests if test["outcome"] == "failed"]
    if failed:
        yield from ("", "### Failures")
    for test in failed:
        yield from (
            "",
            f"`{test['test']}`",
            "",
            "```",
            *(re.sub(r"/\S*/site-packages/", "", line) for line in test["lines"][-12:]),
            "```",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts and write the result after each; returns 0 if all tests have passed, otherwise 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; by default all")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of gpu.md and gpu.json")
    parser.add_argument("--accelerator", default="cuda", help="another one to rehearse: cpu, virtual")
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("-k", dest="chosen", help="run and update only the tests of this expression, as in pytest")
    options = parser.parse_args(arguments)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"`PART` must be one of {', '.join(PARTS)}, got {unknown[0]}.")
    if importlib.util.find_spec("pytest") is None:
        parser.error("this Python has no pytest. Install it, or name another Python: `make gpu PYTHON=...`.")
    options.out.mkdir(parents=True, exist_ok=True)
    file, page = options.out / "gpu.json", options.out / "gpu.md"
    result: Result = json.loads(file.read_text()) if file.exists() else {"parts": {}}
    failed = False
    for part in options.parts or PARTS:
        print(f"== {part}: {PARTS[part]}", flush=True)
        result["machine"] = describe_machine()
        found = run_part(part, options.out, options.accelerator, options.workers, options.chosen)
        if options.chosen and part in result["parts"]:
            found = update(result["parts"][part], found)
        result["parts"][part] = found
        result["parts"] = {name: result["parts"][name] for name in PARTS if name in result["parts"]}
        file.write_text(json.dumps(result, indent=1) + "\n")
        page.write_text(make_page(result))
        print(f"== {part}: {_count(found['tests'])} in {found['seconds']} seconds", flush=True)
        for test in found["tests"]:
            if test["outcome"] == "failed":
                failed = True
                print(f"FAILED {test['test']}", *test["lines"][-6:], sep="\n    ", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

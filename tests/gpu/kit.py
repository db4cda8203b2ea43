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
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
LIMIT = 470.0  # seconds for a part
_FOLDERS = (
    "strategies", "replicas", "reducer", "callbacks", "parity", "activation_checkpointing", "consistency"
)  # fmt: skip
_WARNINGS = (
    "ignore::pytest.PytestConfigWarning",  # settings of plug-ins that this Python lacks, and their markers
    "ignore::pytest.PytestUnknownMarkWarning",
    "ignore:This process (pid=:DeprecationWarning",  # Python 3.12 on workers of loaders, which torch forks
)

_ON_GPU = ("# Results on a GPU", "", "`make gpu` runs these checks and writes `runs/gpu/gpu.md`, copied here.", "")
_REHEARSED = (
    "# Results on {} devices", "",
    "`python -m tests.gpu.kit --accelerator {0}` runs the checks of `make gpu` and writes `runs/gpu/gpu.md`, copied",
    "here. They show placement, order and parity, but no kernel of CUDA; times say nothing about devices.", "",
)  # fmt: skip

_PYTEST = [
    "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", "-o", "junit_logging=no",
    "-o", "addopts=",  # not strict about settings and markers of plug-ins that this Python lacks
    *(part for warning in _WARNINGS for part in ("-W", warning)),
]  # fmt: skip
_LINES, _LONGEST = 25, 400  # lines of the beginning and of the end of a failure, and characters of each

Result = dict[str, Any]


def files_of_part(part: str) -> list[str]:
    """List the test files of a part, those that take longest first."""
    folders = _FOLDERS if part == "parity" else ("gpu",)
    files = [path for folder in folders for path in (ROOT / "tests" / folder).glob("test_*.py")]
    if part != "parity":
        files = [path for path in files if ("sanitizer" in path.name) == (part == "sanitizers")]
    launching = {path for path in files if "run_processes" in path.read_text()}
    return [str(path.relative_to(ROOT)) for path in sorted(files, key=lambda path: (path not in launching, path))]


PARTS = {
    "parity": "The table of parity, tests of strategies, replicas, reducer and callbacks, in float64 on the device.",
    "features": "Behaviour of real devices: NCCL, precision, memory, compiled modules, waits of the host.",
    "sanitizers": "One step of each strategy under CUDA's and torch's sanitizers.",
    "speed": "Time of a training step and memory of gradients, against `ddp`, one device and `DataParallel`.",
}


def run_part(part: str, options: argparse.Namespace) -> Result:
    """Run a part within its time limit and return its results."""
    started = time.monotonic()
    if part == "speed":
        found = run_speed(options.out / part, options)
    else:
        found = run_tests(
            files_of_part(part), "not gpu and not slow and not exhaustive" if part == "parity" else "gpu", options
        )
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return {**found, "seconds": round(time.monotonic() - started), "date": date}


def run_tests(files: Sequence[str], marked: str, options: argparse.Namespace) -> Result:
    """Run test files side by side, each in a process."""
    deadline = time.monotonic() + options.limit
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:

        def run(number: int) -> list[Result]:
            if (remaining := deadline - time.monotonic()) <= 0:
                return [{"test": files[number], "outcome": "failed", "lines": ["not started in time"]}]
            report = Path(folder, f"{number}.xml")
            arguments = [*_PYTEST, f"--junitxml={report}", f"--accelerator={options.accelerator}", "-m", marked]
            arguments += [files[number], *(["-k", options.chosen] if options.chosen else [])]
            code, output = _run(arguments, remaining)
            found = read_report(files[number], report.read_text()) if report.exists() else []
            if code not in (0, 1, 5):  # 1: tests failed; 5: there are none
                ended = {None: f"did not end within {options.limit:g} seconds", 4: "usage error"}.get(
                    code, f"exit code {code}"
                )
                found.append({"test": files[number], "outcome": "failed", "lines": [*output[-30:], ended]})
            print(f"{files[number]}: {_count(found)}", flush=True)
            return found

        return {"tests": [result for found in pool.map(run, range(len(files))) for result in found]}


def read_report(file: str, report: str) -> list[Result]:
    """Return the outcome, the lines of a failure and the properties of each test in a JUnit report."""
    found = []
    outcomes = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    for case in ElementTree.fromstring(report).iter("testcase"):
        problem = next((part for part in case if part.tag in outcomes), None)
        is_skipped = problem is not None and problem.tag == "skipped"
        text = "" if problem is None else problem.get("message") if is_skipped else problem.text
        lines = (text or "").splitlines()
        lines = lines if len(lines) <= 2 * _LINES else [*lines[:_LINES], "...", *lines[-_LINES:]]
        found.append(
            {
                "test": f"{file}::{case.get('name')}",
                "outcome": "passed" if problem is None else outcomes[problem.tag],
                "lines": [line[:_LONGEST] for line in lines],
                "values": {one.get("name"): one.get("value") for one in case.iter("property")},
            }
        )
    return found


def run_speed(folder: Path, options: argparse.Namespace) -> Result:
    """Run the benchmark, whose results of each case stay in the folder if the time is not enough for all."""
    arguments = [str(ROOT / "benchmarks" / "gpu.py"), "--accelerator", options.accelerator, "--output", str(folder)]
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    code, output = _run(arguments, options.limit, "benchmarks")
    outcome = "passed" if code == 0 else "failed"
    test = {"test": "benchmarks/gpu.py", "outcome": outcome, "lines": output[-30:]}
    return {"tests": [test], "speed": json.loads(results.read_text()) if results.exists() else {}}


def _run(arguments: Sequence[str], limit: float, *folders: str) -> tuple[int | None, list[str]]:
    """Run Python with a time limit; returns its exit code, None beyond the limit, and the lines of its output."""
    path = [str(ROOT), *(str(ROOT / folder) for folder in folders), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
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
    """Return a part with the results of the tests that have run now, after the results of others."""
    again = {test["test"] for test in found["tests"]}
    others = [test for test in part["tests"] if test["test"] not in again]
    return {**part, "tests": [*others, *found["tests"]], "date": found["date"]}


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
        with suppress(OSError, IndexError, subprocess.SubprocessError):
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            described["driver"] = subprocess.check_output(command, text=True, timeout=20).splitlines()[0]
    return described


def _count(tests: Iterable[Result]) -> str:
    counts = Counter(test["outcome"] for test in tests)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if counts[outcome])


def make_page(result: Result) -> str:
    """Return the page of a result in Markdown."""
    return "\n".join(_page(result)) + "\n"


def _page(result: Result) -> Iterator[str]:
    on_gpu = result["accelerator"] == "cuda"
    yield from _ON_GPU if on_gpu else (line.format(result["accelerator"]) for line in _REHEARSED)
    yield from ("| | |", "| --- | --- |")
    yield from (f"| {name} | {value} |" for name, value in result["machine"].items())
    yield from ("", "| part | result | seconds | date |", "| --- | --- | --- | --- |")
    for name, part in result["parts"].items():
        yield f"| {name} | {_count(part['tests'])} | {part['seconds']} | {part['date']} |"
    for name, part in result["parts"].items():
        yield from ("", f"## {name.capitalize()}", "", PARTS[name])
        if name == "speed":
            yield from ("", *part["speed"].get("page", []))
        elif name != "parity":  # whose tests are too many to list
            yield from ("", *_tests_table(part["tests"]))
        yield from _failures(part["tests"])


def _tests_table(tests: Sequence[Result]) -> Iterator[str]:
    yield from ("| test | result | measured |", "| --- | --- | --- |")
    for test in tests:
        file, _, name = test["test"].partition("::")
        measured = "; ".join(f"{what}: {value}" for what, value in test.get("values", {}).items())
        if not measured and test["outcome"] == "skipped":
            measured = "".join(test["lines"][-1:])
        title, bracket, case = (name or file).removeprefix("test_").partition("[")
        shown = title.replace("_", " ") + bracket + case
        yield "| " + " | ".join(text.replace("|", "\\|") for text in (shown, test["outcome"], measured)) + " |"


def _failures(tests: Sequence[Result]) -> Iterator[str]:
    failed = [test for test in tests if test["outcome"] == "failed"]
    if failed:
        yield from ("", "### Failures")
    for test in failed:
        lines = [re.sub(r"/\S*/site-packages/", "", line) for line in test["lines"][-12:]]
        yield from ("", f"`{test['test']}`", "", "```", *lines, "```")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts and write the result after each; returns 0 if all tests have passed, otherwise 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; by default all")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of gpu.md and gpu.json")
    parser.add_argument("--accelerator", default="cuda", help="another one to rehearse: cpu, virtual")
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a part; on few cores more are needed")
    parser.add_argument("-k", dest="chosen", help="run and update only the tests of this expression, as in pytest")
    options = parser.parse_args(arguments)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"`PART` must be one of {', '.join(PARTS)}, got {unknown[0]}.")
    if importlib.util.find_spec("pytest") is None:
        parser.error("this Python has no pytest. Install it, or name another Python: `make gpu PYTHON=...`.")
    options.out.mkdir(parents=True, exist_ok=True)
    file, page = options.out / "gpu.json", options.out / "gpu.md"
    own = {"machine": describe_machine(), "accelerator": options.accelerator}
    result: Result = json.loads(file.read_text()) if file.exists() else {**own, "parts": {}}
    if {name: result.get(name) for name in own} != own:
        parser.error(f"`--out {options.out}` has results of another machine or accelerator. Choose another folder.")
    failed = False
    for part in options.parts or PARTS:
        print(f"== {part}: {PARTS[part]}", flush=True)
        found = run_part(part, options)
        is_added = options.chosen and part in result["parts"] and part != "speed"
        result["parts"][part] = update(result["parts"][part], found) if is_added else found
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

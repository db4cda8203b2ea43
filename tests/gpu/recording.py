"""A plug-in of pytest that writes a line of JSON as soon as a test has ended, so that a time limit loses nothing."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "GPU_KIT_RESULTS"
_LINES = 25  # of the beginning and of the end of a failure
_LONGEST = 400  # characters of a line


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a test's outcome: of its call, or of a phase around it that did not pass."""
    if report.when == "call" or not report.passed:
        _write(report.nodeid, report.outcome, report)


@pytest.hookimpl
def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write a module that cannot be imported."""
    if report.failed:
        _write(report.nodeid, "failed", report)


def _write(name: str, outcome: str, report: Any) -> None:
    text = "" if outcome == "passed" else str(report.longrepr[2] if report.skipped else report.longreprtext)
    lines = text.splitlines()
    lines = lines if len(lines) <= 2 * _LINES else [*lines[:_LINES], "...", *lines[-_LINES:]]
    result = {
        "test": name,
        "outcome": outcome,
        "seconds": round(getattr(report, "duration", 0.0), 2),
        "lines": [line[:_LONGEST] for line in lines],
        "values": dict(getattr(report, "user_properties", ())),
    }
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(json.dumps(result) + "\n")

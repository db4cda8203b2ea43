"""Tests that run on ranks: those of a module with the marker `ranks(number)` share one launch of that many ranks."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(number): the test runs on every rank of a launch, and passes on all")


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and item.get_closest_marker("ranks"):
        item.fixturenames.append("launch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the tests of a module share; tests on ranks get its path as a string."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest, folder: Path) -> Callable[[int], Mapping[str, list[Any]]]:
    """Return a function of a number of ranks that runs the selected tests for it and returns their outcomes by name."""
    from tests.strategies.toolkit import run_on_ranks  # knows the rank of the process that imports it

    found: dict[int, Mapping[str, list[Any]] | None] = {}

    def outcomes_of(number: int) -> Mapping[str, list[Any]]:
        if number not in found:
            items = [item for item in request.session.items if item.path == request.path and ranks_of(item) == number]
            cases = {item.name: partial(call, item.function, arguments_of(item)) for item in items}
            found[number] = None  # a launch that fails, after its time limit perhaps, is not repeated for every test
            found[number] = run_on_ranks(number, cases, folder)
        outcomes = found[number]
        assert outcomes is not None, f"the launch of {number} ranks has failed in an earlier test of this module"
        return outcomes

    return outcomes_of


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Take the outcome from the launch, instead of a call in this process."""
    if (number := ranks_of(pyfuncitem)) is None:
        return None
    from tests.strategies.toolkit import values_of

    values_of(pyfuncitem.funcargs["launch"](number), pyfuncitem.name)
    return True


def ranks_of(item: pytest.Item) -> int | None:
    marker = item.get_closest_marker("ranks")
    return None if marker is None else marker.args[0]


def arguments_of(item: pytest.Function) -> dict[str, Any]:
    """Return the parameters of a test, with None for the folder that only ranks know."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters | dict.fromkeys({"folder"} & inspect.signature(item.function).parameters.keys())


def call(function: Callable[..., None], arguments: dict[str, Any], folder: str) -> None:
    """Run a test on this rank."""
    function(**{name: folder if name == "folder" else value for name, value in arguments.items()})

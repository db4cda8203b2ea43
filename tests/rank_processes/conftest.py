"""What modules of tests of `run_processes` share."""

import functools
from collections.abc import Iterator

import pytest

from tests.support.rank_processes import run_processes

from . import rank_functions as ranks


@pytest.fixture(scope="module", params=["fresh", pytest.param("forked", marks=pytest.mark.slow)])
def kind_of_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module asserts holds for both kinds of ranks: its `run_processes` starts one or the other."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "forked":
            patch.setattr(request.module, "run_processes", functools.partial(run_processes, preload=("json",)))
            run_processes(ranks.rank, 1)  # now there is the process that forks others
        yield

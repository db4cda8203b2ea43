"""Tests with the marker `ranks` run on every rank, and fail if they fail on one."""

from pathlib import Path

import pytest

from tests.strategies.toolkit import RANK


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["first", "second"])
def test_a_marked_test_runs_with_its_parameters_on_every_rank(folder, name):
    Path(folder, f"{name} on rank {RANK}").touch()


def test_tests_of_one_process_see_the_folder_that_ranks_have_shared(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {f"{name} on rank {rank}" for name in ("first", "second") for rank in range(2)}


@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=AssertionError, reason="the control")
def test_a_failure_of_one_rank_fails_the_test():
    assert RANK == 0

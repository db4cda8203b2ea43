import pytest

from tests.support.processes import run_processes

from . import comparing_ranks as ranks


@pytest.fixture(scope="session")
def two_compared():
    """What two ranks say of all comparisons; rank 1 is the odd one."""
    return run_processes(ranks.compare_everything, 2, changed_rank=1, timeout=180)


@pytest.fixture(scope="session")
def three_compared():
    """What three ranks say of all comparisons; rank 0 is the odd one."""
    return run_processes(ranks.compare_everything, 3, changed_rank=0, timeout=180)

"""One launch of two ranks and one of three for all comparisons of ranks."""

import pytest
import torch.distributed as dist

from tests.consistency import test_replica_differences, test_setups
from tests.support.processes import run_processes


def compare(odd_rank):
    dist.init_process_group("gloo")
    return test_replica_differences.find_all(odd_rank), test_setups.compare_all(odd_rank)


@pytest.fixture(scope="session")
def two():
    """The tensors and setups that differ on each of two ranks, of which rank 1 is the odd one."""
    return run_processes(compare, 2, odd_rank=1, timeout=180)


@pytest.fixture(scope="session")
def three():
    """The same on three ranks, of which rank 0 is the odd one."""
    return run_processes(compare, 3, odd_rank=0, timeout=180)

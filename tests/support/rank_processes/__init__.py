"""Running a function on several processes under a hard time limit, for tests of distributed code."""

from tests.support.rank_processes.errors import RankError, RankTimeoutError
from tests.support.rank_processes.processes import run_processes

__all__ = ["RankError", "RankTimeoutError", "run_processes"]

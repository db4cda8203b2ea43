"""Running a function on several processes under a hard time limit, for tests of distributed code."""

from lightning_ddp_ext.testing.errors import RankError, RankTimeoutError
from lightning_ddp_ext.testing.processes import run_processes

__all__ = ["RankError", "RankTimeoutError", "run_processes"]

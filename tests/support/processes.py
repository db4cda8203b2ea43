"""`run_processes` with ranks that find the package and Lightning imported."""

import functools

from tests.support import rank_processes

run_processes = functools.partial(rank_processes.run_processes, preload=("lightning_ddp_ext", "torchmetrics"))

"""`run_processes` with ranks that find the package and Lightning imported."""

import functools

from lightning_ddp_ext import testing

run_processes = functools.partial(testing.run_processes, preload=("lightning_ddp_ext", "torchmetrics"))

"""Virtual devices: four devices in host memory that raise where a program breaks CUDA's rules.

`load` registers them with torch as `virtual:0` to `virtual:3`, with Lightning as `accelerator="virtual"`, and the
process group backend `virtual_ccl`, for the rest of the process. Call it before the first backward pass of a process,
since torch starts the threads of all devices then.
"""

from tests.virtual_accelerator.plugin import WithoutDoublePrecision, check, counts, forbid_host_waits, load, reset

__all__ = ["WithoutDoublePrecision", "check", "counts", "forbid_host_waits", "load", "reset"]

"""The strategies for programs that import `lightning_fabric`."""

from lightning_ddp_ext.fabric import *  # noqa: F403
from lightning_ddp_ext.fabric import __all__  # noqa: F401

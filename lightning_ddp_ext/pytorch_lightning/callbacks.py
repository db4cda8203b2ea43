"""The callbacks for programs that import `pytorch_lightning`."""

from lightning_ddp_ext.callbacks import *  # noqa: F403
from lightning_ddp_ext.callbacks import __all__  # noqa: F401

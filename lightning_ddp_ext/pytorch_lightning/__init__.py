"""The same package for programs that import `pytorch_lightning` instead of `lightning.pytorch`.

Every module that needs Lightning is below this package too: `lightning_ddp_ext.pytorch_lightning.callbacks` has the
callbacks. The files are the package's own, loaded a second time. Errors and everything without Lightning are shared, so
that `except lightning_ddp_ext.DDPExtError` catches what either copy raises.
"""

from typing import Any

from lightning_ddp_ext import __all__, __version__  # noqa: F401
from lightning_ddp_ext._import_names import get_public
from lightning_ddp_ext.errors import *  # noqa: F403

__path__ = []  # `_PackageFinder` finds the modules below


def __getattr__(name: str) -> Any:
    return get_public("pytorch_lightning", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

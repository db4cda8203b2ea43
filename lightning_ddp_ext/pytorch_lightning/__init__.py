"""The same package for programs that import `pytorch_lightning`: importing this module chooses that name of Lightning.

Where `lightning` is not installed, or `pytorch_lightning` has been imported before, `lightning_ddp_ext` does the same.
"""

from typing import Any

from lightning_ddp_ext import __all__, __version__  # noqa: F401
from lightning_ddp_ext._import_names import SECOND, choose, get_public
from lightning_ddp_ext.errors import *  # noqa: F403

choose(SECOND)


def __getattr__(name: str) -> Any:
    return get_public(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

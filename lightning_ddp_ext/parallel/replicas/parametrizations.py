"""The cache of `torch.nn.utils.parametrize`, which all threads of a process share."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_ddp_ext._compat.torch import parametrization_cache
from lightning_ddp_ext.errors import UnsupportedFeatureError


class SharedParametrizationCache:
    """Decides whether replicas must run one after another because a step uses `parametrize.cached()`.

    The cache knows a tensor by the module that was parametrized first, which is the master's for all replicas. At the
    same time they would compute with, and pass backward through, the tensors of another replica. So each step of a
    module with parametrizations runs one replica after another the first time; if that has used the cache, it stays so.

    Args:
        master: The module whose replicas run.
    """

    def __init__(self, master: nn.Module) -> None:
        self._may_be_used = any(map(is_parametrized, master.modules()))
        self._used: dict[str, bool] = {}

    def forces_order(self, step: str) -> bool:
        """Return True if replicas must run a step one after another; each step is watched separately."""
        return self._may_be_used and self._used.get(step, True)

    @contextmanager
    def watch(self, step: str, in_order: bool) -> Iterator[None]:
        """Notice whether a step uses the cache.

        Args:
            step: Name of the step.
            in_order: Whether replicas run one after another.

        Raises:
            UnsupportedFeatureError: If replicas that ran at the same time have used it.
        """
        if not self._may_be_used:
            yield
            return
        before = parametrization_cache()
        try:
            yield
        finally:
            used = parametrization_cache() is not before  # leaving `cached()` puts an empty one in its place
            if used and not in_order:
                raise UnsupportedFeatureError(
                    f"`{step}` uses `torch.nn.utils.parametrize.cached()`, whose cache all replicas share, but did not"
                    " in its first batch, so they ran at the same time. Use it for every batch, or not at all."
                )
        if used and not self._used.get(step):
            warnings.warn(
                f"`{step}` uses `torch.nn.utils.parametrize.cached()`, whose cache all replicas share. They run one"
                " after another from now on.",
                stacklevel=2,
            )
        self._used[step] = used or self._used.get(step, False)

"""Private names of Lightning's Fabric. Checked on lightning 2.6.6."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.fabric.strategies.strategy import Strategy, _BackwardSyncControl
from typing_extensions import override


class _Postponing(_BackwardSyncControl):
    def __init__(self, accumulate: Callable[[Any, bool], AbstractContextManager[None]]) -> None:
        self._accumulate = accumulate

    @override
    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[None]:
        return self._accumulate(module, enabled)


def postpone_synchronization(
    strategy: Strategy, accumulate: Callable[[Any, bool], AbstractContextManager[None]]
) -> None:
    """Let `fabric.no_backward_sync(module, enabled)` run its block in the context of a function of both."""
    strategy._backward_sync_control = _Postponing(accumulate)

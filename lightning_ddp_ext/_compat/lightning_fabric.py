"""Private names of Lightning's Fabric. Checked on lightning 2.6.6."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.strategies.strategy import Strategy, _BackwardSyncControl
from typing_extensions import override


class _Postponing(_BackwardSyncControl):
    def __init__(self, postpone: Callable[[], AbstractContextManager[None]]) -> None:
        self._postpone = postpone

    @override
    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[None]:
        return self._postpone() if enabled else nullcontext()


def postpone_synchronization(strategy: Strategy, postpone: Callable[[], AbstractContextManager[None]]) -> None:
    """Let `fabric.no_backward_sync` run its block in the context of a function."""
    strategy._backward_sync_control = _Postponing(postpone)

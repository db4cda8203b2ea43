"""Messages from a rank that has data to those that wait for it."""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_ddp_ext._compat.collectives import cloned_store
from lightning_ddp_ext.distributed.connections import tracked_connections
from lightning_ddp_ext.errors import OtherRankError

_TIMEOUT = timedelta(minutes=30)


def _no_failure() -> None:
    return None


class StoreMailbox:
    """Text, in the order of steps that every rank counts, through the store of a process group.

    Args:
        group: The ranks.
        timeout: How long to wait.
        failure: Returns what any rank has failed of; whoever waits hears of it, whichever rank it waits for, if `wake`
            is called.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: timedelta | None = None,
        failure: Callable[[], str | None] = _no_failure,
    ) -> None:
        with tracked_connections():
            # Connections of its own: who waits holds one, and other threads use the group's.
            self._store = dist.PrefixStore("messages", cloned_store(group))
            self._other_store = dist.PrefixStore("messages", cloned_store(group))
        self._rank = dist.get_rank(group)
        self._timeout = _TIMEOUT if timeout is None else timeout
        self._failure = failure
        self._number = 0
        self._published: list[str] = []

    def publish(self, text: str) -> None:
        """Send the message of this step; on one rank."""
        key = self._next_key()
        self._store.set(key, f"+{text}")
        self._published.append(key)

    def skip(self) -> None:
        """Count a step in which this rank neither sends nor waits."""
        self._next_key()

    def wait(self) -> str:
        """Wait for the message of this step.

        Raises:
            OtherRankError: If a rank has failed.
            torch.distributed.DistStoreError: If no message comes in time.
        """
        key = self._next_key()
        failure = self._failure()
        if failure is not None:
            raise OtherRankError(failure)
        self._store.wait([key], self._timeout)
        text = self._store.get(key).decode()
        if text.startswith("-"):
            raise OtherRankError(text[1:])
        return text[1:]

    def wake(self) -> None:
        """Wake who waits on this rank, from another thread, when a failure is known."""
        failure = self._failure()
        if failure is not None:
            # Who begins to wait later sees the failure itself: it looks after it has counted.
            self._other_store.set(f"{self._number}", f"-{failure}")

    def leave(self) -> None:
        """Tell those who wait for this rank that it is gone, without an error."""
        gone = f"rank {self._rank} ended the run while others still waited. End it on all ranks, or raise an error."
        with contextlib.suppress(dist.DistError):  # all others are gone too
            self._store.set(f"{self._number + 1}", f"-{gone}")

    def forget(self) -> None:
        """Delete the messages of this rank; when every rank is known to have read them."""
        _delete(self._store, self._published)
        self._published = []

    def _next_key(self) -> str:
        self._number += 1
        return f"{self._number}"


def _delete(store: dist.Store, keys: Sequence[str]) -> None:
    for key in keys:
        store.delete_key(key)

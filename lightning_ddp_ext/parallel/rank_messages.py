"""Messages from a rank that has data to those that wait for it, or word that it has failed."""

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_ddp_ext._compat.collectives import cloned_store
from lightning_ddp_ext.errors import OtherRankError

_FAILED = "failed"
_TIMEOUT = timedelta(minutes=30)


class RankMessages:
    """Text, in the order of steps that every rank counts, through the store of a process group.

    Whoever waits hears of a failure on any rank, not only on the one that it waits for.

    Args:
        group: The ranks.
        timeout: How long to wait.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None = None) -> None:
        # A connection of its own: who waits holds it, and other threads use the group's.
        self._store = dist.PrefixStore("messages", cloned_store(group))
        self._timeout = _TIMEOUT if timeout is None else timeout
        self._rank = dist.get_rank(group)
        self._number = 0
        self._published: list[str] = []

    def publish(self, text: str) -> None:
        """Send the message of this step; on one rank."""
        key = self._next_key()
        self._store.set(key, f"+{text}")
        self._published.append(key)

    def pass_over(self) -> None:
        """Count a step in which this rank neither sends nor waits."""
        self._next_key()

    def wait(self) -> str:
        """Wait for the message of this step.

        Raises:
            OtherRankError: If a rank has failed.
        """
        key = self._next_key()
        self._store.wait([key], self._timeout)
        text = self._store.get(key).decode()
        if text.startswith("-"):
            raise OtherRankError(text[1:])
        return text[1:]

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed, whether they wait already or will."""
        text = f"-rank {self._rank} failed: {type(error).__name__}: {error}"
        with contextlib.suppress(dist.DistError):  # the store may be gone, with rank 0
            self._store.set(f"{self._number + 1}", text)
            self._store.set(_FAILED, text)

    def failure(self) -> str | None:
        """Return what a rank has failed of, if any has."""
        return self._store.get(_FAILED).decode()[1:] if self._store.check([_FAILED]) else None

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

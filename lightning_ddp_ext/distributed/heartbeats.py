"""Heartbeats of all ranks through the store of the process group, which show slow, stopped and lost ranks."""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch.distributed as dist

_FAILURE = "failure"  # key in the store
_LOOK = 0.05  # seconds
_STOP_LIMIT = 2.0  # seconds for the last heartbeat to be written at the end of a run
_FAREWELL = 3.0  # seconds that rank 0 stays for other ranks, since the store ends with its process
MOST_READERS = 64  # up to this world size every rank reads all others; above, only rank 0 does at first


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure that any rank has reported: an error, a lost process or connection, or a silent rank."""

    kind: Literal["failed", "lost", "stalled"]
    text: str  # with the rank and its location
    reporter: int | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """The last heartbeat of a rank, and the seconds since it or its state changed."""

    number: int
    silence: float
    state: Mapping[str, Any]
    stillness: float = 0.0
    has_ended: bool = False
    knows: bool = False  # the rank has received the failure


class Heartbeats:
    """Exchanges heartbeats in a thread, over a connection to the store that nothing else uses.

    Calls to the store of a stopped process do not return, so this thread makes no decisions: other threads read
    `peers`, `failure`, the number of completed `exchanges`, and `lost_store`, the error if the store is gone.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        interval: float,
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.interval = interval
        self.peers: dict[int, Peer] = {}
        self.failure: Failure | None = None
        self.exchanges = 0
        self.lost_store: str | None = None
        self._read_ranks = range(world_size) if rank == 0 or world_size <= MOST_READERS else range(1)
        self._number = 0
        self._report: Failure | None = None
        self._has_ended = False
        self._leaves_at = math.inf
        self._wake = threading.Event()
        self._last = time.monotonic()
        # The thread alone holds the store, so that the connection is closed when the thread ends.
        self._thread = threading.Thread(target=self._run, args=(store, describe), name="heartbeats", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write a last heartbeat, so that other ranks do not miss this one, and end the thread."""
        self._leaves_at = time.monotonic() + _FAREWELL
        self._has_ended = True
        self._wake.set()
        # The thread may be stuck in a store that does not answer; it is a daemon.
        self._thread.join(_STOP_LIMIT + (_FAREWELL if self.rank == 0 else 0))

    def report(self, failure: Failure, limit: float = _STOP_LIMIT) -> bool:
        """Report a failure to all ranks, unless another was reported before; return True if written in time."""
        self._report = replace(failure, reporter=self.rank)
        self._wake.set()
        deadline = time.monotonic() + limit
        while self.failure is None and self.lost_store is None and time.monotonic() < deadline:
            time.sleep(_LOOK)
        is_written = self.failure is not None
        if self.failure is None:
            self.failure = failure
        return is_written

    def read_all(self) -> None:
        """Read the heartbeats of all ranks from now on, for the first time at once."""
        self._read_ranks = range(self.world_size)
        self._wake.set()

    def silent(self, limit: float) -> list[int]:
        """Return the other known ranks that have not ended and have been silent for so many seconds."""
        return [
            rank
            for rank, peer in sorted(self.peers.items())
            if rank != self.rank and not peer.has_ended and peer.silence >= limit
        ]

    def _run(self, store: dist.Store, describe: Callable[[], Mapping[str, Any]]) -> None:
        while True:
            is_last, knew = self._has_ended, self.failure is not None
            try:
                self._exchange(store, describe(), is_last)
            except (KeyError, TypeError, ValueError) as error:
                text = f"another program has written into the store of this run ({error}). Use another port or file."
                self.failure = self.failure or Failure("lost", text)
            except Exception as error:  # any error ends the heartbeats, and must not look like a stalled rank
                self.lost_store = str(error).partition("\n")[0] or type(error).__name__
                return
            self.exchanges += 1
            if is_last and not self._is_needed():
                return
            is_news = self.failure is not None and not knew  # rank 0 has to see soon that this rank knows
            self._wake.wait(_LOOK if is_last or is_news else self.interval)
            self._wake.clear()

    def _is_needed(self) -> bool:
        """Return True if rank 0 has to keep the store for a rank that has not ended or received the failure."""
        has_failed = self.failure is not None
        waiting = [
            rank
            for rank in self.silent(0.0)
            if self.peers[rank].silence < 2 * self.interval and not (has_failed and self.peers[rank].knows)
        ]
        return self.rank == 0 and bool(waiting) and time.monotonic() < self._leaves_at

    def _exchange(self, store: dist.Store, state: Mapping[str, Any], is_last: bool) -> None:
        self._number += 1
        beat = {"number": self._number, "has_ended": is_last, "knows": self.failure is not None}
        store.set(_key(self.rank), json.dumps({**beat, "state": dict(state)}))
        report, self._report = self._report, None
        if report is not None:
            store.compare_set(_FAILURE, "", json.dumps(asdict(report)))  # unless another rank was first
        if self.failure is None and store.check([_FAILURE]):
            self.failure = Failure(**json.loads(store.get(_FAILURE)))
        self._read_others(store)

    def _read_others(self, store: dist.Store) -> None:
        missing = [rank for rank in self._read_ranks if rank not in self.peers]
        found = missing if missing and store.check(list(map(_key, missing))) else []
        if missing and not found:
            found = [rank for rank in missing if store.check([_key(rank)])]
        ranks = [*self.peers, *found]
        values = store.multi_get(list(map(_key, ranks))) if ranks else []
        now = time.monotonic()
        # After this process itself was stopped, the missed time must not be held against other ranks.
        passed, self._last = min(now - self._last, 2 * self.interval), now
        beats = zip(ranks, map(json.loads, values), strict=True)
        # A new dictionary, since other threads iterate over the old one.
        self.peers = {rank: _update(self.peers.get(rank), beat, passed) for rank, beat in beats}


def _update(known: Peer | None, beat: dict[str, Any], passed: float) -> Peer:
    silence = 0.0 if known is None or known.number != beat["number"] else known.silence + passed
    stillness = 0.0 if known is None or known.state != beat["state"] else known.stillness + passed
    return Peer(**{**beat, "silence": silence, "stillness": stillness})


def _key(rank: int) -> str:
    return f"beat/{rank}"

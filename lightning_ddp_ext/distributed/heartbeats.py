"""Signs of life of all ranks, through the store where they have met.

A thread of each rank writes about once a second that it lives and where its main thread is, and reads what others have
written. So a rank that is slow is told from one that has been stopped or lost, and whatever one rank has failed of
reaches all of them, also when the connections between them are gone.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch.distributed as dist

_FAILURE = "failure"
_LOOK = 0.05  # seconds
_STOP_LIMIT = 2.0  # seconds that the end of a run waits for the last word to be written
_FAREWELL = 3.0  # seconds that rank 0 stays for others, since the store ends with its process
MOST_READERS = 64  # ranks up to which every rank reads all others; above, others than rank 0 read rank 0 only at first


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run ends; the first one that any rank has told.

    Attributes:
        kind: `"failed"` if a rank raised an error, `"lost"` if a process or connection is gone, `"stalled"` if there
            is no sign of life of a rank.
        text: What happened, with the rank and where it was.
    """

    kind: Literal["failed", "lost", "stalled"]
    text: str


@dataclass(frozen=True, slots=True)
class Peer:
    """What is known about a rank.

    Attributes:
        number: Number of its last heartbeat.
        silence: Seconds since this rank has seen another one.
        stillness: Seconds since this rank has seen another state.
        state: Where the rank was, see `Heartbeats`.
        has_ended: Whether it has ended its run properly.
        knows: Whether it has heard why the run ends.
    """

    number: int
    silence: float
    state: Mapping[str, Any]
    stillness: float = 0.0
    has_ended: bool = False
    knows: bool = False


class Heartbeats:
    """Writes the heartbeats of this rank and reads those of others, in a thread.

    Calls to a store whose process is stopped, or whose host is gone, do not return. So this thread decides nothing;
    what it found is in the attributes, and `exchanges` tells whether it still gets answers.

    Args:
        store: Of this run alone, over a connection that nothing else uses.
        rank: This rank.
        world_size: Number of ranks.
        interval: Seconds between two heartbeats.
        describe: Returns where this rank is, of what JSON can hold; called in the thread.

    Attributes:
        peers: What is known about each rank that has been heard of: this one and all others, or, of more than
            `MOST_READERS` on another rank than 0, only rank 0 until `read_all`.
        failure: Why the run ends, if it does.
        exchanges: How often the store has answered.
        lost_store: Why the store is gone, if it is: it belongs to the process of rank 0, or to torchrun's agent.
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
        self._told: Failure | None = None
        self._has_ended = False
        self._leaves_at = math.inf
        self._wake = threading.Event()
        self._last = time.monotonic()
        # The thread alone holds the store, so that it is gone when the thread ends.
        self._thread = threading.Thread(target=self._run, args=(store, describe), name="heartbeats", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End with a last word, so that others do not miss this rank."""
        self._leaves_at = time.monotonic() + _FAREWELL
        self._has_ended = True
        self._wake.set()
        # It may never come back from a store that does not answer; it is a daemon.
        self._thread.join(_STOP_LIMIT + (_FAREWELL if self.rank == 0 else 0))

    def tell(self, failure: Failure, limit: float = _STOP_LIMIT) -> None:
        """Tell all ranks why the run ends, unless one has told already.

        Args:
            failure: What happened.
            limit: Seconds to wait until it has been written.
        """
        self._told = failure
        self._wake.set()
        deadline = time.monotonic() + limit
        while self.failure is None and self.lost_store is None and time.monotonic() < deadline:
            time.sleep(_LOOK)
        if self.failure is None:
            self.failure = failure

    def read_all(self) -> None:
        """Read all ranks from now on, also one of many that has left the others to rank 0."""
        self._read_ranks = range(self.world_size)

    def ask(self) -> None:
        """Look at once what there is, rather than at the next heartbeat."""
        self._wake.set()

    def silent(self, limit: float) -> list[int]:
        """Return the ranks that have been heard of, have not ended, and have been silent for so many seconds."""
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
            except Exception as error:  # whatever it is, it must not be taken for a rank that has stalled
                self.lost_store = str(error).partition("\n")[0] or type(error).__name__
                return
            self.exchanges += 1
            if is_last and not self._is_needed():
                return
            learnt = self.failure is not None and not knew  # let rank 0 know at once
            self._wake.wait(_LOOK if is_last or learnt else self.interval)
            self._wake.clear()

    def _is_needed(self) -> bool:
        """Whether another rank has still to end, or to hear why the run ends, before the store may go."""
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
        told, self._told = self._told, None
        if told is not None:
            store.compare_set(_FAILURE, "", json.dumps(asdict(told)))  # unless another rank was first
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
        # A process that was stopped itself must not blame the others for the time that it has missed.
        passed, self._last = min(now - self._last, 2 * self.interval), now
        heard = zip(ranks, map(json.loads, values), strict=True)
        # A new dictionary: other threads go through the old one.
        self.peers = {rank: _update(self.peers.get(rank), beat, passed) for rank, beat in heard}


def _update(known: Peer | None, beat: dict[str, Any], passed: float) -> Peer:
    silence = 0.0 if known is None or known.number != beat["number"] else known.silence + passed
    stillness = 0.0 if known is None or known.state != beat["state"] else known.stillness + passed
    return Peer(**{**beat, "silence": silence, "stillness": stillness})


def _key(rank: int) -> str:
    return f"beat/{rank}"

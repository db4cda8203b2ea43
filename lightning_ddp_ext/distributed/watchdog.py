"""Ending a run on all ranks when one of them fails, is gone, or gives no sign of life."""

import ctypes
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from lightning_ddp_ext._compat.collectives import abort_groups, keeps_store_in_file, port_of_store
from lightning_ddp_ext.distributed.connections import break_connections, count_received
from lightning_ddp_ext.distributed.exchange import list_ranks
from lightning_ddp_ext.distributed.heartbeats import MOST_READERS, Failure, Heartbeats, Peer
from lightning_ddp_ext.distributed.stall_report import (
    describe_all,
    describe_deadlock,
    describe_own_state,
    describe_place,
    describe_silent,
    find_error,
    find_main_thread,
    make_report,
)

_MISSED = 2  # heartbeats that a rank misses before it is taken for gone, where a connection is gone too
_LOOK = 0.1  # seconds


def find_reason(beats: Heartbeats, error: BaseException) -> Failure:
    """Find out why a connection is gone, or nobody came; takes some heartbeats if no rank has told.

    Args:
        beats: The heartbeats.
        error: What this rank has seen.
    """
    missed = _MISSED * beats.interval
    deadline = time.monotonic() + missed + 2 * beats.interval + 1
    exchanges = beats.exchanges
    beats.read_all()
    beats.ask()
    while time.monotonic() < deadline and beats.lost_store is None and not beats.silent(missed):
        if beats.world_size <= MOST_READERS:  # more would ask too much of the store
            beats.ask()
        time.sleep(_LOOK)
        if beats.failure is not None:
            return beats.failure
    said = str(error).partition("\n")[0]
    if silent := beats.silent(missed):
        return Failure("lost", f"the process of {list_ranks(silent)} is gone: {describe_silent(beats, silent)}")
    if beats.lost_store is not None:
        return describe_lost_store(beats)
    if beats.exchanges <= exchanges + 1:  # one may have been under way
        return Failure("lost", f"the store of {_owner()} does not answer rank {beats.rank} ({said}). {_LOOK_AT_OWNER}")
    if ended := [rank for rank, peer in beats.peers.items() if peer.has_ended]:
        return _describe_ended(beats, ended)
    if unheard := [rank for rank in range(beats.world_size) if rank not in beats.peers]:
        return _describe_unheard(beats, unheard, said)
    return Failure(
        "lost",
        f"rank {beats.rank} waited in vain for another one ({said}). All ranks live: {describe_all(beats)}. Look at the"
        " rank that is elsewhere than the others; if it is only slow, raise `timeout`.",
    )


def describe_lost_store(beats: Heartbeats) -> Failure:
    """Say what it means that the store is gone."""
    rank_0 = beats.peers.get(0)
    if rank_0 is not None and rank_0.has_ended:
        return _describe_ended(beats, [0])
    return Failure(
        "lost",
        f"the process of {_owner()} is gone, and its store with it ({beats.lost_store}). Look for its last lines of"
        " output, and whether its host ran out of memory.",
    )


def find_stall(beats: Heartbeats, unanswered: float, limit: float) -> Failure | None:
    """Tell whether a rank has stalled.

    Args:
        beats: The heartbeats.
        unanswered: Seconds for which the store has not answered.
        limit: Seconds without a sign of life, or in which every rank has waited for another one.
    """
    if unanswered >= limit:
        return Failure(
            "stalled",
            f"{_owner()} has stalled: its store has not answered rank {beats.rank} for {unanswered:.0f} s."
            f" {_LOOK_AT_OWNER}",
        )
    if silent := beats.silent(limit):
        return Failure(
            "stalled",
            f"{list_ranks(silent)} stalled: {describe_silent(beats, silent)} A process has been stopped, or a host or"
            " the link to it is gone.",
        )
    peers = beats.peers.values()
    if len(peers) == beats.world_size and all(_waits_in_vain(peer, limit) for peer in peers):
        return Failure("stalled", describe_deadlock(beats, min(peer.stillness for peer in peers)))
    return None


def _waits_in_vain(peer: Peer, limit: float) -> bool:
    """Whether a rank waits for others, and no byte has come; one that takes its time, or much data, is left alone."""
    waits = bool(peer.state.get("waits")) and peer.state.get("received") is not None
    return waits and peer.stillness >= limit and not peer.has_ended


_LOOK_AT_OWNER = "Its process has been stopped, or its host or the link to it is gone."


def _describe_ended(beats: Heartbeats, ranks: list[int]) -> Failure:
    return Failure(
        "lost",
        f"{list_ranks(ranks)} ended the run while rank {beats.rank} still waited. Run equally many steps on every"
        " rank.",
    )


def _describe_unheard(beats: Heartbeats, ranks: list[int], said: str) -> Failure:
    return Failure(
        "lost",
        f"rank {beats.rank} waited in vain for another one ({said}), and there has been no sign of life of"
        f" {list_ranks(ranks)}. Look for the last lines of output there, and whether the process has been started.",
    )


def _owner() -> str:
    """Return whose process has the store."""
    return "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) else "rank 0"


STALL_EXIT_CODE = 74
"""Exit code of a process whose main thread could not be made to end the run in an orderly way."""

_INTERVAL, _INTERVAL_IN_FILE = 1.0, 2.0  # seconds between heartbeats; every one makes a file longer
_BEATS = 6  # heartbeats within the limit, at least
_PATIENCE = 2.0  # seconds for a rank to notice by itself that another one has failed
_GRACE = 4.0  # seconds for the main thread to end the run once it has been interrupted after a stall
_FINISH = 60.0  # seconds to end the run after an error, if there is no limit


class Interruption(BaseException):
    """Raised in a main thread that neither waits for another rank nor ends by itself after one has failed."""


class RunWatch:
    """Watches over a run on one of its ranks.

    Two threads: one exchanges heartbeats and may get stuck in a store that does not answer, the other one decides.

    Args:
        store: A store of this run alone, over a connection that nothing else uses.
        rank: This rank.
        world_size: Number of ranks.
        limit: Seconds without a sign of life after which a rank counts as stalled; None for never.
        position: Returns the `"step"` and the `"phase"` of this rank; called about once a second in a thread.
        before_exit: Called before this process is ended the hard way, for a second at most.

    Attributes:
        wakers: Called in a thread when a failure is known, for a second at most.

    Example:
        ```python
        watch = RunWatch(store.clone(), rank, world_size, 60.0, lambda: {"step": step}, lambda: None)
        watch.start()
        try:
            train()
        except Exception as error:
            watch.fail(error)
            raise
        finally:
            watch.stop()
        ```
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        limit: float | None,
        position: Callable[[], Mapping[str, Any]],
        before_exit: Callable[[], None],
    ) -> None:
        interval = _INTERVAL_IN_FILE if keeps_store_in_file(store) else _INTERVAL
        interval = interval if limit is None else min(interval, limit / _BEATS)
        self._position = position
        self._counts = dist.get_backend() == dist.Backend.GLOO  # others have ways that are no sockets
        self._port = port_of_store(store)
        self._last_state: Mapping[str, Any] | None = None  # where this rank was when it met an error
        self._beats = Heartbeats(store, rank, world_size, interval, self._describe)
        self._limit = limit
        self._before_exit = before_exit
        self.wakers: list[Callable[[], object]] = []
        self._is_leaving = threading.Event()  # the main thread has an error, and ends the run
        self._is_over = threading.Event()
        self._has_reported = False
        self._exchanges = -1
        self._unanswered = 0.0  # seconds
        self._stuck = 0.0
        self._place = ""
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._beats.start()
        self._thread.start()

    def stop(self) -> None:
        """End with the run; nothing that happens to other ranks concerns this one any more."""
        self._is_over.set()
        self._is_leaving.set()
        self._beats.stop()
        self._thread.join()
        self.wakers.clear()  # they may hold connections

    @property
    def failure(self) -> str | None:
        """Why the run ends, if any rank has told."""
        failure = self._beats.failure
        return None if failure is None else failure.text

    def _describe(self) -> Mapping[str, Any]:
        if self._last_state is not None:
            return self._last_state
        received = count_received(self._port) if self._counts else None
        return describe_own_state(self._position, received)

    def _leave(self, error: BaseException) -> None:
        place = find_error(error)
        self._last_state = {**self._describe(), "where": str(place), "collective": place.collective}
        self._is_leaving.set()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed, and let nobody wait for what it does no more.

        Args:
            error: What it has failed of.
        """
        self._leave(error)
        told = f"{type(error).__name__}: {error}".rstrip(": ")
        at = describe_place(self._describe())
        self._beats.tell(Failure("failed", f"rank {self._beats.rank} failed: {told} (at {at})"))
        break_connections()

    def explain(self, error: BaseException) -> str:
        """Say what has happened to which rank, where this one only sees that a connection is gone.

        Takes a few heartbeats if no rank has told. Other ranks are told.

        Args:
            error: What this rank sees.
        """
        self._leave(error)
        self._beats.tell(self._beats.failure or find_reason(self._beats, error))
        break_connections()
        assert self._beats.failure is not None
        return self._beats.failure.text

    def _watch(self) -> None:
        pause = self._beats.interval / 2
        last = time.monotonic()
        while not self._is_over.wait(pause):
            now = time.monotonic()
            # If this process was stopped itself, or without Python's lock, the others are not to blame.
            passed, last = min(now - last, 2 * pause), now
            failure = self._beats.failure or self._find_stall(passed)
            if failure is not None:
                self._end(failure)
                return

    def _find_stall(self, passed: float) -> Failure | None:
        beats, limit = self._beats, self._limit
        if limit is None:
            return None
        if beats.lost_store is not None:
            return self._find_stuck(passed, limit)
        self._unanswered = self._unanswered + passed if beats.exchanges == self._exchanges else 0.0
        self._exchanges = beats.exchanges
        return find_stall(beats, self._unanswered, limit)

    def _find_stuck(self, passed: float, limit: float) -> Failure | None:
        """Without a store, what remains to be seen is whether this rank goes on."""
        place = find_main_thread()
        is_stuck = bool(place.collective) and str(place) == self._place
        self._stuck = self._stuck + passed if is_stuck else 0.0
        self._place = str(place)
        return describe_lost_store(self._beats) if self._stuck >= limit else None

    def _end(self, failure: Failure) -> None:
        """See to it that the main thread ends the run, or end the process."""
        is_stall = failure.kind == "stalled"
        if is_stall:
            self._report(failure)
            self._beats.tell(failure, limit=0)
            self._let_others_report()
        for wake in self.wakers:
            _run_briefly(wake)
        if is_stall or not self._is_leaving.wait(_PATIENCE):
            self._interrupt()
        if not self._is_leaving.wait(_GRACE):
            self._exit(failure)
        if not self._is_over.wait(_GRACE if is_stall else self._limit or _FINISH):
            self._exit(failure)

    def _let_others_report(self) -> None:
        """Wait until all have heard of a stall, and have had time to say where they are while they still are there."""
        deadline = time.monotonic() + 2 * self._beats.interval
        while time.monotonic() < deadline and self._beats.lost_store is None:
            if all(peer.knows for peer in self._beats.peers.values() if peer.silence < 2 * self._beats.interval):
                break
            time.sleep(self._beats.interval / 8)
        time.sleep(self._beats.interval)

    def _interrupt(self) -> None:
        """Make the main thread raise an error, whether it waits for another rank or is busy."""
        break_connections(lasting=True)
        _run_briefly(abort_groups)
        main = threading.main_thread().ident
        if not self._is_leaving.wait(_PATIENCE / 2) and main is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Interruption))

    def _report(self, failure: Failure) -> None:
        self._has_reported = True
        report = make_report(self._beats, failure, self._describe())
        _run_briefly(lambda: print(report, file=sys.stderr, flush=True))

    def _exit(self, failure: Failure) -> None:
        if not self._has_reported:
            self._report(failure)
        _run_briefly(self._before_exit)
        for child in multiprocessing.active_children():  # workers of loaders, which would look for us for seconds
            child.kill()
        _run_briefly(sys.stdout.flush)
        os._exit(STALL_EXIT_CODE)


def _run_briefly(function: Callable[[], object], limit: float = 1.0) -> None:
    """Run something that may not come back, and go on after a second."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(limit)

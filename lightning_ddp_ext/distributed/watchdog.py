"""End a run on all ranks when one of them fails, is gone, or gives no sign of life."""

import ctypes
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from lightning_ddp_ext._compat.torch import abort_groups, keeps_store_in_file, port_of_store
from lightning_ddp_ext.distributed.backends import break_connections, count_received, uses_sockets_only
from lightning_ddp_ext.distributed.heartbeats import Failure, Heartbeats
from lightning_ddp_ext.distributed.stall_report import (
    REMEDY,
    StallDetector,
    describe_own_state,
    find_error,
    find_main_call,
    find_reason,
    format_position,
    make_report,
    print_in_one_line,
    shows_full_stacks,
)
from lightning_ddp_ext.errors import OtherRankError, text_of

STALL_EXIT_CODE = 74
"""Exit code of a process whose main thread could not be made to end the run in an orderly way."""

_INTERVAL, _INTERVAL_IN_FILE = 1.0, 2.0  # seconds between heartbeats; each one makes a file longer
_BEATS = 6  # heartbeats within the limit, at least
_LOOKS = 4  # at a main thread in the same call, two in each heartbeat, before its device is asked
_PATIENCE = 2.0  # seconds for a rank to notice by itself that another one has failed
_GRACE = 4.0  # seconds for the main thread to end the run after it was interrupted
_FINISH = 60.0  # seconds to end the run after an error, if there is no limit


class Interruption(BaseException):
    """Raised in a main thread that neither waits for another rank nor ends by itself after a failure."""


class DeviceProbe:
    """Finds out whether the device completes its work while the main thread is stuck in one call.

    `silent` is the number of the probe that the device has not answered, or None. A probe waits in a separate thread,
    and only then: a CUDA graph that is being captured would break.
    """

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self.silent: int | None = None
        self._synchronize = synchronize
        self._number = 0
        self._thread: threading.Thread | None = None
        self._place: object = None
        self._looks = 0

    def look(self, position: object) -> None:
        """Look at the last probe, and at the position and the call of the main thread; call this at regular times."""
        place = position, find_main_call()
        self._looks, self._place = self._looks + 1 if place == self._place else 0, place
        is_pending = self._thread is not None and self._thread.is_alive()
        self.silent = self._number if is_pending else None
        if not is_pending and self._looks >= _LOOKS:
            self._number += 1
            self._thread = threading.Thread(target=self._synchronize, name="device-probe", daemon=True)
            self._thread.start()


class RunWatch:
    """Watches a run on one of its ranks, from `start` to `stop`; report an error of the run with `fail` or `explain`.

    One thread exchanges heartbeats and may get stuck in a store that does not answer; the other one decides.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        limit: float | None,
        position: Callable[[], Mapping[str, Any]],
        before_exit: Callable[[], None],
        synchronize: Callable[[], object] | None = None,
    ) -> None:
        interval = _INTERVAL_IN_FILE if keeps_store_in_file(store) else _INTERVAL
        interval = interval if limit is None else min(interval, limit / _BEATS)
        self._position = position
        # `synchronize` waits for the device of this rank; None for the CPU.
        self._probe = None if synchronize is None else DeviceProbe(synchronize)
        # On a device, the probe shows whether other backends progress.
        self._counts_bytes = self._probe is not None or uses_sockets_only(dist.get_backend())
        self._port = port_of_store(store)
        self._last_state: Mapping[str, Any] | None = None  # of this rank when it met an error
        self._beats = Heartbeats(store, rank, world_size, interval, self._describe)
        self._limit = limit
        self._stalls = None if limit is None else StallDetector(self._beats, limit)
        self._before_exit = before_exit  # called before the process ends without an exception
        self._is_leaving = threading.Event()  # the main thread has an error, and ends the run
        self._is_over = threading.Event()
        self._has_reported = self._is_reported = False  # by this rank, or by any
        self._looked, self._stopped, self._woken = time.monotonic(), 0.0, -math.inf
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def start(self) -> None:
        """Start both threads."""
        self._beats.start()
        self._thread.start()

    def stop(self) -> None:
        """End with the run; later failures of other ranks are ignored."""
        self._is_over.set()
        self._is_leaving.set()
        self._beats.stop()
        self._thread.join()

    @property
    def failure(self) -> str | None:
        """The first failure that any rank has reported."""
        failure = self._beats.failure
        return None if failure is None else failure.text

    def fail(self, error: BaseException) -> None:
        """Report an error of this rank, and shut down its connections so that no rank waits for it."""
        self._leave(error)
        text = f"failed: {type(error).__name__}: {text_of(error)}".rstrip(": ")
        text += f" (at {format_position(self._describe())})"
        rank = self._beats.rank
        # Lightning's launcher kills rank 0 soon after the end of another rank, so another rank with the same error
        # should be the first to report it, which also prints the traceback.
        time.sleep(self._beats.interval / 2 if rank == 0 else 0)
        self._beats.report(Failure("failed", f"rank {rank} {text}"))
        break_connections()
        first = self._beats.failure
        if first is not None and first.reporter not in (None, rank) and first.text.endswith(text):
            print_in_one_line(error, f"rank {rank} {text}, as rank {first.reporter}, which prints the traceback.")

    def explain(self, error: BaseException) -> OtherRankError:
        """Return the reason for a lost connection, and report it; takes a few heartbeats if no rank has reported."""
        self._leave(error)
        self._look()  # this thread may wake before the other one
        self._beats.report(self._beats.failure or find_reason(self._beats, error))
        break_connections()
        failure, own = self._beats.failure, f"the process of rank {self._beats.rank}"
        assert failure is not None
        text = failure.text
        if failure.kind == "lost" and time.monotonic() - self._woken < _FINISH:
            stopped = f"{own} was stopped, or native code held Python's lock, for {self._stopped:.0f} s"
            text = f"{stopped}, and the other ranks have ended meanwhile. {REMEDY}"
        explained = OtherRankError(text)
        shown = "see the stall report." if self._is_reported else text
        print_in_one_line(explained, f"rank {self._beats.rank} ends with OtherRankError: {shown}")
        return explained

    def _leave(self, error: BaseException) -> None:
        location = find_error(error)
        self._last_state = {**self._describe(), "where": str(location), "collective": location.collective}
        self._is_leaving.set()

    def _describe(self) -> Mapping[str, Any]:
        if self._last_state is not None:
            return self._last_state
        received = count_received(self._port) if self._counts_bytes else None
        state = describe_own_state(self._position, received)
        if self._probe is not None and self._probe.silent is not None:
            where = f"{state['where']}, its device does not answer"
            state.update(where=where, waits=True, probe=self._probe.silent)
        return state

    def _watch(self) -> None:
        pause = self._beats.interval / 2
        while not self._is_over.wait(pause):
            # After this process itself was stopped, the missed time must not be held against other ranks.
            passed = min(self._look(), 2 * pause)
            if self._probe is not None:
                self._probe.look(describe_own_state(self._position))
            failure = self._beats.failure
            if failure is None and self._stalls is not None:
                failure = self._stalls.find(passed, self._describe)
            if failure is not None:
                self._end(failure)
                return

    def _look(self) -> float:
        """Return the seconds since the last call, which are many after this process was stopped."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        if passed >= (self._limit or _FINISH):
            self._stopped, self._woken = passed, now
        return passed

    def _end(self, failure: Failure) -> None:
        """Make the main thread end the run, or end the process."""
        is_stall = failure.kind == "stalled"
        if is_stall:
            is_known = self._beats.report(failure, limit=2 * self._beats.interval)
            living = (rank for rank, peer in self._beats.peers.items() if peer.silence < 2 * self._beats.interval)
            # One report is enough, of the first living rank, if the store has told it of the stall.
            if shows_full_stacks() or not is_known or self._beats.rank <= min(living, default=0):
                self._print_report(failure)
            self._is_reported = True
            self._let_others_report()
        if is_stall or not self._is_leaving.wait(_PATIENCE):
            self._interrupt()
        if not self._is_leaving.wait(_GRACE) or not self._is_over.wait(_GRACE if is_stall else self._limit or _FINISH):
            self._exit(failure)

    def _let_others_report(self) -> None:
        """Wait until all living ranks know of a stall, and have had time to describe their location."""
        deadline = time.monotonic() + 2 * self._beats.interval
        while time.monotonic() < deadline and self._beats.lost_store is None:
            if all(peer.knows for peer in self._beats.peers.values() if peer.silence < 2 * self._beats.interval):
                break
            time.sleep(self._beats.interval / 8)
        time.sleep(self._beats.interval)

    def _interrupt(self) -> None:
        """Raise an error in the main thread, whether it waits for another rank or is busy."""
        break_connections(lasting=True)
        _run_briefly(abort_groups)
        main = threading.main_thread().ident
        if not self._is_leaving.wait(_PATIENCE / 2) and main is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Interruption))

    def _print_report(self, failure: Failure) -> None:
        self._has_reported = True
        report = make_report(self._beats, failure, self._describe())
        _run_briefly(lambda: print(report, file=sys.stderr, flush=True))

    def _exit(self, failure: Failure) -> None:
        if not self._has_reported:
            self._print_report(failure)
        _run_briefly(self._before_exit)
        for child in multiprocessing.active_children():  # workers of loaders, which poll for this process for seconds
            child.kill()
        _run_briefly(sys.stdout.flush)
        os._exit(STALL_EXIT_CODE)


def _run_briefly(function: Callable[[], object], limit: float = 1.0) -> None:
    """Run a function that may not return, and continue after a second."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(limit)

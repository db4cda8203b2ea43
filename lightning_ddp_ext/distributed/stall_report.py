"""Faults that heartbeats show, in words with a remedy, and the stall report with the location of every rank."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_ddp_ext._compat import TRAINER_CALL
from lightning_ddp_ext._import_names import LIBRARIES, NAMES, PACKAGE
from lightning_ddp_ext.distributed.exchange import list_ranks
from lightning_ddp_ext.distributed.heartbeats import MOST_READERS, Failure, Heartbeats, Peer
from lightning_ddp_ext.distributed.network import node_name
from lightning_ddp_ext.errors import text_of

_OURS = "lightning_ddp_ext"
# Modules that do nothing but exchange tensors and messages with other ranks.
_EXCHANGING = tuple(
    f"{_OURS}.{one}" for one in ("reducer.", "consistency", "distributed.exchange", "steps.active_collectives")
)
# It waits for ranks without a collective.
_WAITING = (*_EXCHANGING, f"{PACKAGE}.loaders.lockstep_source")
_COLLECTIVES = "torch.distributed.distributed_c10d"
_LIBRARIES = {"torch", "torchmetrics", *LIBRARIES, _OURS}
# Callers of these functions are not shown.
_ENTRIES = {(f"{lightning}.trainer.call", TRAINER_CALL) for lightning in NAMES}

_Line = tuple[FrameType, int]


@dataclass(frozen=True, slots=True)
class StackLocation:
    """The location of a thread: its collective if any, the functions around it, and whether it waits for ranks."""

    collective: str
    code: str
    waits: bool = False

    def __str__(self) -> str:
        is_in_code = self.code.startswith(f"{self.collective} (")
        return " <- ".join(part for part in ("" if is_in_code else self.collective, self.code) if part)


def find_main_call() -> object:
    """Return an identity of the innermost Python call of the main thread, equal while it lasts, and rarely later."""
    frame = _main_frame()
    return None if frame is None else (id(frame), frame.f_lasti)


def describe_main_stack() -> str:
    """Return the user's frames of the main thread below the Trainer's entry, and the innermost one, which is last."""
    lines = list(_walk(_main_frame()))
    if not shows_full_stacks():
        lines = [line for line in lines if line is lines[0] or _is_users(line)]
    return "".join(traceback.StackSummary.extract(iter(lines[::-1])).format())


def shows_full_stacks() -> bool:
    """Return True if the user asks for whole stacks, and for the traceback of an error on every rank."""
    return bool(os.environ.get("LIGHTNING_DDP_EXT_FULL_STACKS"))


def print_in_one_line(error: BaseException, line: str) -> None:
    """Have Python print a line in place of the traceback of an error that nothing catches."""
    vars(error)["line_of_rank"] = line  # on the error, since a reference to it would keep the tensors of its frames
    if not shows_full_stacks():
        sys.excepthook = partial(_print_line, sys.excepthook)


def _print_line(otherwise: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: Any) -> None:
    line = vars(error).get("line_of_rank")
    otherwise(kind, error, trace) if line is None else print(line, file=sys.stderr, flush=True)


def find_stack_location(frame: FrameType | None) -> StackLocation:
    """Return the location of a thread from its innermost frame."""
    return _make_location(list(_walk(frame)))


def find_error(error: BaseException) -> StackLocation:
    """Return the location where an error was raised."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return _make_location(frames[::-1])


def _make_location(frames: list[_Line]) -> StackLocation:
    collective = ""
    waits = bool(frames) and (_module(frames[0]) == _COLLECTIVES or _module(frames[0]).startswith(_EXCHANGING))
    while frames and _module(frames[0]).split(".")[0] == "torch":
        inner = frames.pop(0)
        # The outermost function is the one in the user's code: `all_gather_object` calls several collectives.
        if _module(inner).startswith("torch.distributed") and _function(inner) != "wrapper":
            collective = _function(inner)
    if not frames:
        return StackLocation(collective, "", waits)
    if not collective and _module(frames[0]).startswith(_WAITING):
        collective = _function(frames[0])
    shown = frames[:2]
    user = next((outer for outer in frames if _is_users(outer)), None)
    if user is not None and user not in shown:
        shown = [frames[0], user]
    return StackLocation(collective, " <- ".join(map(_describe, shown)), waits)


def _walk(frame: FrameType | None) -> Iterator[_Line]:
    while frame is not None and (_module((frame, 0)), frame.f_code.co_name) not in _ENTRIES:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _main_frame() -> FrameType | None:
    identity = threading.main_thread().ident
    return None if identity is None else sys._current_frames().get(identity)


def _module(line: _Line) -> str:
    return str(line[0].f_globals.get("__name__", ""))


def _function(line: _Line) -> str:
    return line[0].f_code.co_name


def _is_users(line: _Line) -> bool:
    root = _module(line).split(".")[0]
    return root not in _LIBRARIES and root not in sys.stdlib_module_names


def _describe(line: _Line) -> str:
    return f"{_function(line)} ({Path(line[0].f_code.co_filename).name}:{line[1]})"


def describe_own_state(position: Callable[[], Mapping[str, Any]], received: int | None = None) -> dict[str, Any]:
    """Return the state of this rank for a heartbeat, with the number of bytes received from other ranks if known."""
    location = find_stack_location(_main_frame())
    state = {
        "host": node_name(),
        "process": os.getpid(),
        "where": str(location),
        "collective": location.collective,
        "waits": location.waits,
        "received": received,
    }
    try:
        return {**state, **position()}
    except Exception:  # attributes of a Trainer change meanwhile; a heartbeat must not fail because of them
        return state


def format_position(state: Mapping[str, Any]) -> str:
    """Return the step, the phase and the location of a rank in words."""
    parts = [f"step {state['step']}"] if "step" in state else []
    parts += [str(state["phase"])] if state.get("phase") else []
    parts += [f"in {state['where']}"] if state.get("where") else []
    return ", ".join(parts) or "before its first step"


def _describe_silent(beats: Heartbeats, ranks: Sequence[int]) -> str:
    """Describe the silence and the last location of ranks."""
    seconds = min(beats.peers[rank].silence for rank in ranks)
    last = "; ".join(
        f"rank {rank} was last seen on host {beats.peers[rank].state.get('host')} at {_position_of(beats, rank)}"
        for rank in ranks
    )
    return f"no sign of life of {list_ranks(list(ranks))} for {seconds:.0f} s. {last}."


def _describe_all(beats: Heartbeats) -> str:
    """Describe the positions of all known ranks."""
    return "; ".join(f"rank {rank}: {_position_of(beats, rank)}" for rank in sorted(beats.peers))


_APART = 2  # heartbeats without a change in which ranks that wait for different messages are found
_MISSED = 2  # heartbeats that a rank misses before it is considered gone, after a connection is gone
_LOOK = 0.1  # seconds
_STOPPED = "Its process has been stopped, or its host or the link to it is gone."


def find_reason(beats: Heartbeats, error: BaseException) -> Failure:
    """Find the reason for a lost connection or a timeout; takes a few heartbeats if no rank has reported."""
    missed = _MISSED * beats.interval
    deadline = time.monotonic() + missed + 2 * beats.interval + 1
    exchanges = beats.exchanges
    beats.read_all()
    while time.monotonic() < deadline and beats.lost_store is None and not beats.silent(missed):
        if beats.world_size <= MOST_READERS:  # more readers would overload the store
            beats.read_all()
        time.sleep(_LOOK)
        if beats.failure is not None:
            return beats.failure
    seen = text_of(error).partition("\n")[0]
    waited = f"rank {beats.rank} waited in vain for another one ({seen})"
    if silent := beats.silent(missed):
        return Failure("lost", f"the process of {list_ranks(silent)} is gone: {_describe_silent(beats, silent)}")
    if beats.lost_store is not None:
        return _describe_lost_store(beats)
    if beats.exchanges <= exchanges + 1:  # one exchange may have been under way
        return Failure("lost", f"the store of {_owner()} does not answer rank {beats.rank} ({seen}). {_STOPPED}")
    if ended := [rank for rank, peer in beats.peers.items() if peer.has_ended]:
        return _describe_ended(beats, ended)
    if unheard := [rank for rank in range(beats.world_size) if rank not in beats.peers]:
        return Failure(
            "lost",
            f"{waited}, and there has been no sign of life of {list_ranks(unheard)}. Look for the last lines of output"
            " there, and whether the process has been started.",
        )
    outside = [rank for rank, peer in sorted(beats.peers.items()) if not peer.state.get("collective")]
    is_one_sided = 0 < len(outside) < beats.world_size
    place = f"{list_ranks(outside)}, in no collective" if is_one_sided else "the rank that is elsewhere than the others"
    return Failure(
        "lost",
        f"{waited}. All ranks live: {_describe_all(beats)}. Look at {place}; if it is only slow, raise `timeout`.",
    )


class StallDetector:
    """Finds a store, a rank, or all ranks in a collective that have been still for `limit` seconds."""

    def __init__(self, beats: Heartbeats, limit: float) -> None:
        self._beats = beats
        self._limit = limit
        self._exchanges = -1
        self._location = ""
        self._unanswered = self._stuck = 0.0  # seconds

    def find(self, passed: float, describe: Callable[[], Mapping[str, Any]]) -> Failure | None:
        """Return a stall, or None; `passed` seconds after the last call, `describe` returns the state of this rank."""
        beats = self._beats
        if beats.lost_store is None:
            self._unanswered = self._unanswered + passed if beats.exchanges == self._exchanges else 0.0
            self._exchanges = beats.exchanges
            return _find_stalled_ranks(beats, self._unanswered, self._limit)
        # Without the store, only the main thread of this rank shows whether the run continues.
        state = describe()
        is_stuck = bool(state["collective"] or "probe" in state) and state["where"] == self._location
        self._stuck = self._stuck + passed if is_stuck else 0.0
        self._location = state["where"]
        return _describe_lost_store(beats) if self._stuck >= self._limit else None


def _find_stalled_ranks(beats: Heartbeats, unanswered: float, limit: float) -> Failure | None:
    if unanswered >= limit:
        return Failure(
            "stalled",
            f"{_owner()} has stalled: its store has not answered rank {beats.rank} for {unanswered:.0f} s. {_STOPPED}",
        )
    if silent := beats.silent(limit):
        return Failure(
            "stalled",
            f"{list_ranks(silent)} stalled: {_describe_silent(beats, silent)} A process has been stopped, or a host or"
            " the link to it is gone.",
        )
    peers = beats.peers.values()
    messages = {rank: str(peer.state.get("awaits", "")) for rank, peer in sorted(beats.peers.items())}
    are_known = len(peers) == beats.world_size and all(messages.values()) and len({*messages.values()}) > 1
    if are_known and all(peer.state.get("waits") and peer.stillness >= _APART * beats.interval for peer in peers):
        listed = "; ".join(f"rank {rank} for {message}" for rank, message in messages.items())
        return Failure(
            "stalled",
            f"ranks wait for different messages: {listed}. Run equally many backward passes on every rank.",
        )
    # A rank that receives bytes is not still: a large or slow transfer is no deadlock.
    is_deadlock = len(peers) == beats.world_size and all(
        peer.state.get("waits")
        and peer.state.get("received") is not None
        and peer.stillness >= limit
        and not peer.has_ended
        for peer in peers
    )
    if not is_deadlock:
        return None
    are_apart = len({(peer.state.get("step"), peer.state.get("phase")) for peer in peers}) > 1
    uneven = ' If ranks have different numbers of batches, use `strategy="ddp_join"`.' if are_apart else ""
    return Failure(
        "stalled",
        f"every rank waits for another one, and nothing has come for {min(peer.stillness for peer in peers):.0f} s."
        f" {_describe_all(beats)}. Call the same collectives in the same order on every rank.{uneven}",
    )


def _describe_lost_store(beats: Heartbeats) -> Failure:
    """Return the failure of rank 0, or of torchrun's agent, with whose process the store is gone."""
    rank_0 = beats.peers.get(0)
    if rank_0 is not None and rank_0.has_ended:
        return _describe_ended(beats, [0])
    return Failure(
        "lost",
        f"the process of {_owner()} is gone, and its store with it ({beats.lost_store}). Look for its last lines of"
        " output, and whether its host ran out of memory.",
    )


def _describe_ended(beats: Heartbeats, ranks: list[int]) -> Failure:
    return Failure(
        "lost",
        f"{list_ranks(ranks)} ended the run while rank {beats.rank} still waited. Run equally many steps on every"
        " rank.",
    )


def _owner() -> str:
    """Return the owner of the process with the store."""
    return "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) else "rank 0"


_COLUMNS = ("rank", "host", "process", "optimizer step", "phase", "stack location", "last heartbeat")
REMEDY = "Restart the run from its last checkpoint."
_SHORTENED = ", without frames of libraries (all with LIGHTNING_DDP_EXT_FULL_STACKS=1)"


def make_report(beats: Heartbeats, failure: Failure, own_state: Mapping[str, Any]) -> str:
    """Return the report of this rank: a table of all ranks, and its own Python stack."""
    peers = {**beats.peers, beats.rank: Peer(0, 0.0, own_state)}
    rows = [_COLUMNS, *(_make_row(rank, peers[rank], rank == beats.rank) for rank in sorted(peers))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    missing = beats.world_size - len(peers)
    who = f"rank {beats.rank} of {beats.world_size}"
    return "\n".join(
        [
            f"===== stall report of {who} =====",
            failure.text,
            "",
            *table,
            *([f"nothing is known here about {missing} more"] if missing else []),
            "",
            f"Python stack of the main thread of rank {beats.rank}{_SHORTENED * (not shows_full_stacks())}:",
            describe_main_stack().rstrip(),
            "",
            f"{who} ends now. {REMEDY}",
            "=====",
            "",
        ]
    )


def _make_row(rank: int, peer: Peer, is_own: bool) -> tuple[str, ...]:
    state = peer.state
    sign = "this rank" if is_own else "has ended" if peer.has_ended else f"{peer.silence:.1f} s ago"
    shown = ("host", "process", "step", "phase", *(() if peer.has_ended else ("where",)))
    cells = [str(state.get(name, "")) for name in shown]
    cells += [""] * (len(_COLUMNS) - 2 - len(cells))
    return (str(rank), *cells, sign)


def _position_of(beats: Heartbeats, rank: int) -> str:
    peer = beats.peers[rank]
    return "the end of its run" if peer.has_ended else format_position(peer.state)

"""What is said when ranks do not go on: which one is where, since when, and what to do about it."""

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_ddp_ext.distributed.exchange import list_ranks
from lightning_ddp_ext.distributed.heartbeats import Failure, Heartbeats, Peer

_OURS = "lightning_ddp_ext"
# Code of ours that does nothing but exchange tensors and messages with other ranks.
_EXCHANGING = tuple(
    f"{_OURS}.{module}"
    for module in (
        "reducer.",
        "consistency.",
        "distributed.exchange",
        "distributed.flat_tensors",
        "join.active_ranks",
    )
)
_WAITING = (*_EXCHANGING, f"{_OURS}.join.lockstep_loader")  # waits for ranks without a function of torch
_COLLECTIVES = "torch.distributed.distributed_c10d"
_LIBRARIES = {"torch", "lightning", "torchmetrics", _OURS}
_ENTRY = ("lightning.pytorch.trainer.call", "_call_and_handle_interrupt")  # what is outside says nothing

_Line = tuple[FrameType, int]


@dataclass(frozen=True, slots=True)
class StackLocation:
    """Where a thread is.

    Attributes:
        collective: The function of `torch.distributed` that it is in, or what of ours waits there; empty elsewhere.
        code: Functions around it with files and lines, the innermost first.
        waits: Whether it can only be waiting for other ranks, or be about to.
    """

    collective: str
    code: str
    waits: bool = False

    def __str__(self) -> str:
        is_said = self.code.startswith(f"{self.collective} (")
        return " <- ".join(part for part in ("" if is_said else self.collective, self.code) if part)


def find_main_thread() -> StackLocation:
    """Return where the main thread is. It is not stopped for that, and may be elsewhere by now."""
    return find_stack_location(_main_frame())


def describe_main_stack() -> str:
    """Return the Python stack of the main thread below the Trainer's entry, the innermost call last."""
    lines = list(_walk(_main_frame()))
    return "".join(traceback.StackSummary.extract(iter(lines[::-1])).format())


def find_stack_location(frame: FrameType | None) -> StackLocation:
    """Return where a thread is.

    Args:
        frame: Its innermost frame.
    """
    return _make_place(list(_walk(frame)))


def find_error(error: BaseException) -> StackLocation:
    """Return where an error was raised."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return _make_place(frames[::-1])


def _make_place(frames: list[_Line]) -> StackLocation:
    collective = ""
    waits = bool(frames) and (_module(frames[0]) == _COLLECTIVES or _module(frames[0]).startswith(_EXCHANGING))
    while frames and _module(frames[0]).split(".")[0] == "torch":
        inner = frames.pop(0)
        # The outermost function is the one that was called: an `all_gather_object` is made of several collectives.
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
    while frame is not None and (_module((frame, 0)), frame.f_code.co_name) != _ENTRY:
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


_COLUMNS = ("rank", "host", "process", "step", "phase", "where", "last sign of life")
_REMEDY = "Restart the run from its last checkpoint."


def describe_own_state(position: Callable[[], Mapping[str, Any]], received: int | None = None) -> dict[str, Any]:
    """Return where this rank is, for a heartbeat.

    Args:
        position: Returns the step and the phase; what it raises while a run begins or ends does no harm.
        received: How many bytes have come from other ranks; None if that is not known.
    """
    place = find_main_thread()
    state = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "where": str(place),
        "collective": place.collective,
        "waits": place.waits,
        "received": received,
    }
    try:
        return {**state, **position()}
    except Exception:  # attributes of a run that come and go; a heartbeat must not fail for them
        return state


def describe_place(state: Mapping[str, Any]) -> str:
    """Return where a rank is, in words, from the state of its heartbeat."""
    parts = [f"step {state['step']}"] if "step" in state else []
    parts += [str(state["phase"])] if state.get("phase") else []
    parts += [f"in {state['where']}"] if state.get("where") else []
    return ", ".join(parts) or "before its first step"


def describe_silent(beats: Heartbeats, ranks: Sequence[int]) -> str:
    """Say of ranks without a sign of life since when, and where they were last."""
    seconds = min(beats.peers[rank].silence for rank in ranks)
    last = "; ".join(
        f"rank {rank} was last seen on host {beats.peers[rank].state['host']} at {_place_of(beats, rank)}"
        for rank in ranks
    )
    return f"no sign of life of {list_ranks(list(ranks))} for {seconds:.0f} s. {last}."


def describe_deadlock(beats: Heartbeats, seconds: float) -> str:
    """Say what each rank waits for, while nothing comes."""
    return (
        f"every rank waits for another one, and nothing has come for {seconds:.0f} s. {describe_all(beats)}."
        " Call the same collectives in the same order on every rank."
    )


def describe_all(beats: Heartbeats) -> str:
    """Say where all ranks are that are known."""
    return "; ".join(f"rank {rank}: {_place_of(beats, rank)}" for rank in sorted(beats.peers))


def make_report(beats: Heartbeats, failure: Failure, own_state: Mapping[str, Any]) -> str:
    """Return the report of this rank: a table of all ranks, and its own Python stack.

    Args:
        beats: The heartbeats.
        failure: Why the run ends.
        own_state: Where this rank is now.
    """
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
            f"Python stack of the main thread of rank {beats.rank}:",
            describe_main_stack().rstrip(),
            "",
            f"{who} ends now. {_REMEDY}",
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


def _place_of(beats: Heartbeats, rank: int) -> str:
    peer = beats.peers[rank]
    return "the end of its run" if peer.has_ended else describe_place(peer.state)

"""What is said when ranks do not go on: which one is where, since when, and what to do about it."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_ddp_ext.network.watching.heartbeats import Failure, Heartbeats, Peer
from lightning_ddp_ext.network.watching.whereabouts import describe_main_stack, find_main_thread
from lightning_ddp_ext.parallel.messages.exchange import list_ranks

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

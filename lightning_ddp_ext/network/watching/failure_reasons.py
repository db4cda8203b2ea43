"""Why ranks do not go on, concluded from their heartbeats."""

import os
import time

from lightning_ddp_ext.network.watching.heartbeats import MOST_READERS, Failure, Heartbeats, Peer
from lightning_ddp_ext.network.watching.stall_report import describe_all, describe_deadlock, describe_silent
from lightning_ddp_ext.parallel.messages.exchange import list_ranks

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

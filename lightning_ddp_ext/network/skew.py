"""How far the clocks of two ranks are apart, asked through the store where they meet.

Rank 0 asks, the other rank answers with its time, and the answer was given somewhere between asking and hearing it:
taken in the middle, it is wrong by half of the round trip at most. The shortest of several round trips counts. (F.
Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989.)
"""

import json
import time
from dataclasses import dataclass

import torch.distributed as dist

_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far a clock is ahead of rank 0's.

    Attributes:
        seconds: The difference; negative if it is behind.
        uncertainty: How far the difference may be from the truth, in seconds: half of the shortest round trip.
    """

    seconds: float
    uncertainty: float


def ask_clock(store: dist.Store) -> ClockOffset:
    """Compare the clock of this rank with that of the rank that calls `tell_clock` on the same store.

    Args:
        store: A store of nobody else, such as a `PrefixStore`.

    Returns:
        The offset of the other clock.
    """
    rounds = []
    for number in range(_ROUNDS):
        asked, started = time.time(), time.perf_counter()
        store.set(f"asked/{number}", "")
        told = json.loads(store.get(f"told/{number}"))
        half = (time.perf_counter() - started) / 2
        rounds.append(ClockOffset(told - (asked + half), half))
    return min(rounds, key=lambda offset: offset.uncertainty)


def tell_clock(store: dist.Store) -> None:
    """Answer `ask_clock` of another rank.

    Args:
        store: The same store.
    """
    for number in range(_ROUNDS):
        store.wait([f"asked/{number}"])
        store.set(f"told/{number}", json.dumps(time.time()))

"""Ranks tell rank 0 who and where they are, and all get the same table back.

The store may hold keys of an earlier attempt: torchrun restarts workers on the store of its agent. So every call has a
name of its own, and nobody believes a table that does not repeat the number the rank has just drawn:

    rank 0    invites under a new name; collects an entry of every rank; publishes the table
    others    answer the newest invitation, until a table repeats their number
"""

import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_ddp_ext.errors import DDPExtError, NetworkInterfaceError, RendezvousError

_INVITATION = "invitation"
_TABLE = "table"
_PROBLEM = "problem"
_SEEN = "seen"
_NUMBERS = "numbers"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1  # seconds
_FAREWELL = 2.0  # seconds that rank 0 waits for others to read what went wrong
_PATIENCE = 30.0  # seconds after which rank 0 says whom it waits for

_logger = logging.getLogger(__name__)

_ERRORS: dict[str, type[DDPExtError]] = {error.__name__: error for error in (NetworkInterfaceError, RendezvousError)}

Entry = Mapping[str, Any]


class RollCall:
    """One attempt of all ranks to meet.

    Args:
        store: Where they meet.
        name: Name of the attempt.
        rank: This rank.
        world_size: Number of ranks.
        deadline: When to give up, in seconds of `time.monotonic`.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, world_size: int, deadline: float) -> None:
        self.store = dist.PrefixStore(name, store)
        self._meeting = store
        self.rank = rank
        self.world_size = world_size
        self._deadline = deadline

    def publish(self, key: str, value: Any) -> None:
        """Write a value for all ranks.

        Args:
            key: Its name.
            value: What JSON can hold.
        """
        self.store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """Read a value that has been published.

        Args:
            key: Its name.

        Returns:
            The value.
        """
        return json.loads(self.store.get(key))

    def wait(self, *keys: str, limit: float | None = None) -> bool:
        """Wait until all of some values have been published, or until a rank has met a problem.

        Args:
            keys: Their names.
            limit: Seconds to wait; None until the deadline.

        Returns:
            Whether they have been; False if the time is over.

        Raises:
            DDPExtError: The problem that a rank has met.
        """
        deadline = self._deadline if limit is None else min(self._deadline, time.monotonic() + limit)

        def came() -> bool:
            if self.store.check([_PROBLEM]):
                self._raise(self.read(_PROBLEM))
            return not keys or self.store.check(list(keys))

        return bool(poll(came, deadline))

    def fail(self, error: DDPExtError) -> None:
        """Let the others know why this rank gives up; the caller raises the error.

        Args:
            error: What is wrong.
        """
        self.publish(_PROBLEM, [type(error).__name__, str(error)])
        self._leave()

    def withdraw(self) -> None:
        """Take the invitation back, so that no later attempt answers it."""
        self._meeting.set(_INVITATION, "")

    def _leave(self) -> None:
        if self.rank != 0:
            self.store.add(_SEEN, 1)
            return
        self.withdraw()
        # The store ends with this process: give others time to read.
        others = self.world_size - 1
        poll(lambda: self.store.add(_SEEN, 0) >= others, time.monotonic() + _FAREWELL)

    def _raise(self, problem: list[str]) -> None:
        self._leave()
        raise _ERRORS[problem[0]](problem[1])


def call_roll(store: dist.Store, world_size: int, invitation: Entry, timeout: timedelta) -> RollCall:
    """Invite the other ranks; for rank 0.

    Args:
        store: Where they meet.
        world_size: Number of ranks.
        invitation: What they need to know for their entries.
        timeout: How long to wait for them.

    Returns:
        The call.
    """
    name = uuid.uuid4().hex
    roll = RollCall(store, name, 0, world_size, time.monotonic() + timeout.total_seconds())
    store.set(_INVITATION, json.dumps({**invitation, "name": name}))
    return roll


def invites(store: dist.Store, run: str) -> bool:
    """Tell whether the ranks of a run are being called in a store.

    Args:
        store: A store, of whichever run.
        run: The name of the run, in the invitation of its rank 0.

    Returns:
        Whether they are.
    """
    invitation = _read_invitation(store)
    return invitation is not None and invitation.get("run") == run


def collect_entries(roll: RollCall, remedy: str) -> dict[int, Entry]:
    """Wait for the entries of all other ranks; for rank 0.

    Args:
        roll: The call.
        remedy: What to do about ranks that do not come.

    Returns:
        Entries by rank.

    Raises:
        RendezvousError: If ranks are missing when the time is over.
        DDPExtError: The problem that a rank has met.
    """
    ranks = range(1, roll.world_size)
    keys = [str(rank) for rank in ranks]

    def missing() -> str:
        return ", ".join(key for key in keys if not roll.store.check([key]))

    if not roll.wait(*keys, limit=_PATIENCE):
        _logger.warning("rank 0 is still waiting for rank %s of %d ranks. %s", missing(), roll.world_size, remedy)
    if not roll.wait(*keys):
        error = RendezvousError(f"rank {missing()} of {roll.world_size} ranks did not join in time. {remedy}")
        roll.fail(error)
        raise error
    roll.withdraw()
    return {rank: roll.read(str(rank)) for rank in ranks}


def publish_table(roll: RollCall, table: Entry, entries: Mapping[int, Entry]) -> None:
    """Tell all ranks what follows from their entries; for rank 0.

    Args:
        roll: The call.
        table: What follows.
        entries: What they said.
    """
    numbers = {str(rank): entry["number"] for rank, entry in entries.items()}
    roll.publish(_TABLE, {**table, _NUMBERS: numbers})


def answer_roll(
    store: dist.Store, rank: int, world_size: int, describe: Callable[[Entry], Entry], timeout: timedelta
) -> tuple[RollCall, Entry]:
    """Answer the invitation of rank 0 and wait for the table; for all other ranks.

    Args:
        store: Where they meet.
        rank: This rank.
        world_size: Number of ranks.
        describe: Makes this rank's entry from an invitation.
        timeout: How long to wait for the others.

    Returns:
        The call, and the table.

    Raises:
        RendezvousError: If the time is over.
        DDPExtError: What `describe` raised, or the problem that a rank has met.
    """
    number = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    answered: dict[str, RollCall] = {}

    def answer(invitation: Entry) -> None:
        roll = answered[invitation["name"]] = RollCall(store, invitation["name"], rank, world_size, deadline)
        try:
            entry = describe(invitation)
        except DDPExtError as error:
            roll.fail(error)
            raise
        roll.publish(str(rank), {**entry, "number": number})

    def completed() -> tuple[RollCall, Entry] | None:
        invitation = _read_invitation(store)
        if invitation and invitation["name"] not in answered:
            answer(invitation)
        if not answered:
            return None
        newest = list(answered.values())[-1]
        if not newest.wait(_TABLE, limit=0):
            return None
        table = newest.read(_TABLE)
        return (newest, table) if table[_NUMBERS].get(str(rank)) == number else None

    result: tuple[RollCall, Entry] | None = poll(completed, deadline)
    if result is None:
        raise RendezvousError(
            f"rank {rank} waited {timeout.total_seconds():g} s for rank 0 to find all {world_size} ranks."
            " Check that all of them have been started."
        )
    return result


def _read_invitation(store: dist.Store) -> Entry | None:
    text = store.get(_INVITATION) if store.check([_INVITATION]) else b""
    invitation: Entry | None = json.loads(text) if text else None
    return invitation


def poll(question: Callable[[], Any], deadline: float) -> Any:
    """Ask until the answer is truthy or the time is over, at least once.

    Args:
        question: What to ask.
        deadline: When to stop, in seconds of `time.monotonic`.

    Returns:
        The last answer.
    """
    pause = _FIRST_PAUSE
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return answer

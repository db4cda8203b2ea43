"""What is concluded from heartbeats, of more ranks than there could be processes here."""

import json
import threading
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from lightning_ddp_ext.distributed.heartbeats import MOST_READERS, Heartbeats
from lightning_ddp_ext.distributed.watchdog import find_reason

INTERVAL = 0.2  # seconds
MANY = MOST_READERS + 2
STATE = {"host": "node1", "process": 1, "where": "all_reduce", "collective": "all_reduce", "waits": True}


@contextmanager
def others(store, ranks, dead=()):
    """Write the heartbeats of some ranks; of the dead ones, there is only the first."""
    is_over = threading.Event()

    def beat():
        number = 0
        while not is_over.wait(INTERVAL / 4):
            number += 1
            for rank in ranks:
                if number == 1 or rank not in dead:
                    written = {"number": number, "has_ended": False, "knows": False, "state": STATE}
                    store.set(f"beat/{rank}", json.dumps(written))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    yield
    is_over.set()
    thread.join()


def find_reason_of(world_size, ranks, dead=()):
    """Ask rank 1 of a world why it waits in vain."""
    store = dist.HashStore()
    beats = Heartbeats(store, 1, world_size, INTERVAL, lambda: STATE)
    with others(store, ranks, dead):
        beats.start()
        try:
            return find_reason(beats, RuntimeError("connection reset"))
        finally:
            beats.stop()


@pytest.mark.parametrize("world_size", [3, MANY])
def test_ranks_are_said_to_be_gone_or_silent_or_to_live_among_few_and_many(world_size):
    last = world_size - 1
    gone = find_reason_of(world_size, [0, *range(2, world_size)], dead=[last])
    assert gone.kind == "lost"
    assert f"the process of rank {last} is gone" in gone.text
    silent = find_reason_of(world_size, [0, *range(2, last)])
    assert f"no sign of life of rank {last}." in silent.text
    assert "All ranks live" not in silent.text
    living = find_reason_of(world_size, [0, *range(2, world_size)])
    assert "All ranks live: rank 0: " in living.text
    assert f"rank {last}: in all_reduce" in living.text

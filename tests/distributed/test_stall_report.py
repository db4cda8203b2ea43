"""Locations of threads, and what is concluded from heartbeats of more ranks than there could be processes here."""

import json
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from lightning_ddp_ext.distributed.heartbeats import MOST_READERS, Heartbeats
from lightning_ddp_ext.distributed.stall_report import (
    describe_main_stack,
    describe_own_state,
    find_reason,
    find_stack_location,
)

INTERVAL = 0.2  # seconds
MANY = MOST_READERS + 2
STATE = {"host": "node1", "process": 1, "where": "all_reduce", "collective": "all_reduce", "waits": True}


@contextmanager
def others(store, ranks, dead=(), state=STATE):
    """Write the heartbeats of some ranks; of the dead ones, there is only the first."""
    is_over = threading.Event()

    def beat():
        number = 0
        while not is_over.wait(INTERVAL / 4):
            number += 1
            for rank in ranks:
                if number == 1 or rank not in dead:
                    written = {"number": number, "has_ended": False, "knows": False, "state": state}
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


@pytest.mark.parametrize("world_size", [3, pytest.param(MANY, marks=pytest.mark.slow)])
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


def test_the_main_thread_is_found_from_another_one():
    found = []

    def look():
        found.extend([describe_own_state(dict), describe_main_stack()])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    state, stack = found
    assert state["collective"] == ""
    assert "test_the_main_thread_is_found_from_another_one (test_stall_report.py:" in state["where"]
    assert "in test_the_main_thread_is_found_from_another_one\n    thread." in stack


def stack_of_main_thread():
    """Return the stack of the main thread in a call of a library in a call of a library."""
    namespace = {"__name__": "torch.nn.modules.module", "look": describe_main_stack}
    exec(compile("def inner():\n    return look()\ndef outer():\n    return inner()", "module.py", "exec"), namespace)
    return namespace["outer"]()


def test_a_stack_has_the_frames_of_the_user_and_the_innermost_one_or_all_of_them(monkeypatch):
    monkeypatch.delenv("LIGHTNING_DDP_EXT_FULL_STACKS", raising=False)
    short = stack_of_main_thread()
    assert "in stack_of_main_thread" in short
    assert short.rstrip().splitlines()[-2].endswith("in _main_frame")
    assert "module.py" not in short
    monkeypatch.setenv("LIGHTNING_DDP_EXT_FULL_STACKS", "1")
    full = stack_of_main_thread()
    assert full.count("module.py") == 2
    assert len(full) > len(short)


def test_a_host_name_cannot_control_a_terminal(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node\x1b[2J\n1")
    state = describe_own_state(dict)
    assert state["host"] == "node\\x1b[2J\\n1"


def test_the_rank_that_is_in_no_collective_is_named():
    stuck = {**STATE, "where": "load (data.py:3)", "collective": "", "waits": False}
    store = dist.HashStore()
    beats = Heartbeats(store, 1, 3, INTERVAL, lambda: STATE)
    with others(store, [0]), others(store, [2], state=stuck):
        beats.start()
        try:
            reason = find_reason(beats, RuntimeError("timed out")).text
        finally:
            beats.stop()
    assert "All ranks live: rank 0: in all_reduce; rank 1: in all_reduce; rank 2: in load (data.py:3)" in reason
    assert "Look at rank 2, in no collective" in reason


def test_something_else_in_the_store_is_a_failure_with_that_reason():
    for key in ("beat/0", "failure"):
        store = dist.HashStore()
        store.set(key, "GET / HTTP/1.1")
        beats = Heartbeats(store, 1, 2, INTERVAL, lambda: STATE)
        beats.start()
        deadline = time.monotonic() + 30
        while beats.failure is None and time.monotonic() < deadline:
            time.sleep(INTERVAL / 4)
        beats.stop()
        assert beats.failure is not None
        assert "another program has written into the store of this run" in beats.failure.text


def test_a_function_of_torch_distributed_is_named_with_its_caller():
    frames = {}
    namespace = {"__name__": "torch.distributed.distributed_c10d", "look": lambda: frames.update(f=sys._getframe(1))}
    exec(
        "def all_gather():\n    look()\ndef wrapper():\n    all_gather()\ndef all_gather_object():\n    wrapper()",
        namespace,
    )

    def training_step():
        namespace["all_gather_object"]()

    training_step()
    place = find_stack_location(frames["f"])
    assert place.collective == "all_gather_object"
    assert place.code.startswith("training_step (test_stall_report.py:")
    assert str(place).startswith("all_gather_object <- training_step (")
    assert place.waits


def test_a_thread_waits_for_ranks_only_where_nothing_else_takes_time():
    modules = {
        "torch.distributed.distributed_c10d": True,
        "lightning_ddp_ext.reducer.gradient_reducer": True,
        "torch.distributed.checkpoint.filesystem": False,
        "lightning_ddp_ext.loaders.lockstep_source": False,
        "theirs": False,
    }
    for module, waits in modules.items():
        namespace = {"__name__": module, "sys": sys}
        exec("def stay():\n    return sys._getframe()", namespace)
        assert find_stack_location(namespace["stay"]()).waits == waits, module
    assert str(find_stack_location(None)) == ""  # of a thread that has ended

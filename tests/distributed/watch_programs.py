"""Ranks of which one gets into trouble, watched over in plain torch; imported by the process that forks them."""

import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_ddp_ext._compat.collectives import cloned_store, is_lost_connection
from lightning_ddp_ext.distributed.process_group import init_process_group
from lightning_ddp_ext.distributed.watchdog import Interruption, RunWatch
from lightning_ddp_ext.errors import OtherRankError
from tests.distributed import rank_server
from tests.support.ports import free_port

LIMIT = 4.0  # seconds without a sign of life
STEPS, WHEN = 6, 3


def stop(watch):
    time.sleep(2)  # heartbeats say where this rank is
    os.kill(os.getpid(), signal.SIGSTOP)


def kill(watch):
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)


def fail(watch):
    raise ArithmeticError("boom")


def fail_with_a_collective_under_way(watch):
    dist.all_reduce(torch.ones(1), async_op=True)
    raise ArithmeticError("boom")


def sleep(watch):
    time.sleep(1.5 * LIMIT)


def sleep_long(watch):
    time.sleep(16)


def leave(watch):
    watch.stop()
    raise SystemExit(0)


def wait_for_another_rank(watch):
    dist.recv(torch.ones(1), 1 - dist.get_rank())


def wait_while_bytes_come(watch):
    """Wait as long for another rank, while something comes over a connection: as from a slow network."""
    other = 1 - dist.get_rank()
    threading.Timer(2 * LIMIT, lambda: dist.send(torch.ones(1), other)).start()
    threading.Thread(target=_trickle, daemon=True).start()
    wait_for_another_rank(watch)


def _trickle():
    listener = socket.create_server(("127.0.0.1", 0))
    own = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    for _ in range(int(4 * LIMIT)):
        other.sendall(b"x")
        own.recv(1)
        time.sleep(0.5)


def wait_for_a_fault(watch):
    """Be slow in Python while another rank fails."""
    while True:
        sum(range(1000))


def be_deaf(watch):
    """Be in a call that nothing can interrupt while another rank fails."""
    time.sleep(60)


# By name: what ranks 0 and 1 do in a step, instead of going on; and other settings.
SCENARIOS = {
    "nothing": ({}, {}),
    "rank 1 is stopped": ({1: stop}, {}),
    "rank 0 is stopped": ({0: stop}, {}),
    "rank 1 is stopped, file": ({1: stop}, {"file": True}),
    "rank 1 is killed": ({1: kill}, {}),
    "rank 0 is killed": ({0: kill}, {}),
    "rank 1 fails": ({1: fail}, {}),
    "rank 0 fails": ({0: fail}, {}),
    "rank 1 fails with a collective under way": ({1: fail_with_a_collective_under_way}, {}),
    "rank 1 is slow": ({1: sleep}, {}),
    "rank 1 leaves": ({1: leave}, {}),
    "each waits for the other": (dict.fromkeys(range(2), wait_for_another_rank), {}),
    "each waits while bytes come": (dict.fromkeys(range(2), wait_while_bytes_come), {}),
    "rank 1 fails while rank 0 is busy": ({0: wait_for_a_fault, 1: fail}, {}),
    "rank 1 fails while rank 0 is deaf": ({0: be_deaf, 1: fail}, {}),
    "rank 1 does not come": ({1: sleep_long}, {"timeout": 10.0, "limit": None}),
    "rank 1 is stopped, no limit": ({1: stop}, {"timeout": 10.0, "limit": None}),
}


def run_rank(*, rank, main_port, actions, file=None, limit=LIMIT, timeout=60.0):
    """Make some all-reduces; returns how many."""
    init_process_group(
        backend="gloo", rank=rank, world_size=2, main_address="127.0.0.1", main_port=main_port,
        timeout=timedelta(seconds=timeout), init_method=file,
    )  # fmt: skip
    step = 0
    store = dist.PrefixStore("watch", cloned_store(dist.group.WORLD))
    watch = RunWatch(store, rank, 2, limit, lambda: {"step": step, "phase": "counting"}, lambda: print("LAST WORDS"))
    watch.start()
    try:
        for step in range(STEPS):
            if step == WHEN and str(rank) in actions:
                globals()[actions[str(rank)]](watch)
            dist.all_reduce(torch.ones(1))
    except SystemExit:
        return step
    except BaseException as error:
        if isinstance(error, Interruption) or is_lost_connection(error):
            raise OtherRankError(watch.explain(error)) from error
        watch.fail(error)
        raise
    finally:
        watch.stop()
    return step + 1


def play_scenarios(folder):
    """Play all scenarios at the same time; returns the outcomes of both ranks by name."""
    torch.set_num_threads(1)
    jobs = []
    for name, (actions, options) in SCENARIOS.items():
        settings = {"main_port": free_port(), "actions": {str(r): f.__name__ for r, f in actions.items()}, **options}
        if settings.pop("file", False):
            settings["file"] = f"file://{folder}/meeting"
        jobs += [{"rank": f"{name}/{rank}", "arguments": {**settings, "rank": rank}} for rank in range(2)]
    for job in jobs:
        (Path(folder) / f"{os.getpid()}-{job['rank']}").parent.mkdir(parents=True, exist_ok=True)
    rows = {row["rank"]: row for row in rank_server.run(run_rank, jobs, 80.0, Path(folder))}
    return {name: [rows[f"{name}/{rank}"] for rank in range(2)] for name in SCENARIOS}

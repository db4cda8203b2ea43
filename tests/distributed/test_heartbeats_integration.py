"""Ranks that watch each other in plain torch. One launch plays all scenarios at the same time."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext._compat.torch import cloned_store, is_lost_connection
from lightning_ddp_ext.distributed.process_group import init_process_group
from lightning_ddp_ext.distributed.watchdog import STALL_EXIT_CODE, Interruption, RunWatch
from tests.distributed import rank_server
from tests.support.ports import free_port
from tests.support.processes import run_processes

pytestmark = pytest.mark.slow
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


class Mute(ArithmeticError):
    def __str__(self):
        return self.no_such_attribute


def fail_without_a_text(watch):
    raise Mute


def fail_as_if_a_connection_was_lost(watch):
    raise RuntimeError("Connection closed by peer")


def fall_asleep(watch):
    """Be stopped for longer than the other rank waits."""
    time.sleep(2)
    subprocess.Popen(["sh", "-c", f"sleep {3 * LIMIT:g}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


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


DEVICE = threading.Event()  # set while the device of this rank completes its work
DEVICE.set()


def hang_on_the_device(watch):
    """Be in a call that waits for a device for ever."""
    DEVICE.clear()
    time.sleep(60)


# With thirty processes on few cores; the ranks wait for a minute without a watch.
SOON = LIMIT + 35
AFTER_WORD_OF_IT = 25.0


@dataclass
class Scenario:
    """Actions of ranks in a step, and parts of the error of each living rank, raised `within` some seconds."""

    actions: dict[int, Callable]
    errors: dict[int, list[str]] = field(default_factory=dict)
    within: float = SOON
    options: dict[str, object] = field(default_factory=dict)


FAILED = "OtherRankError: rank 1 failed: ArithmeticError: boom"
STALLED = [
    "OtherRankError: rank 1 stalled: no sign of life of rank 1 for", "step 3, counting",
    "in stop (test_heartbeats_integration.py",
]  # fmt: skip
DEADLOCK = "OtherRankError: every rank waits for another one, and nothing has come for"
IN_VAIN = "OtherRankError: rank 0 waited in vain"
NO_LIMIT = {"timeout": 10.0, "limit": None}
SCENARIOS = {
    "nothing": Scenario({}),
    "rank 1 is slow": Scenario({1: sleep}),
    "each waits while bytes come": Scenario(dict.fromkeys(range(2), wait_while_bytes_come)),
    "rank 1 is stopped": Scenario({1: stop}, {0: STALLED}),
    "rank 1 is stopped, file": Scenario({1: stop}, {0: STALLED}, options={"file": True}),
    "rank 1 is stopped, no limit": Scenario(
        {1: stop}, {0: ["OtherRankError: the process of rank 1 is gone: no sign of life of rank 1"]}, options=NO_LIMIT
    ),
    "rank 0 is stopped": Scenario(
        {0: stop}, {1: ["OtherRankError: rank 0 has stalled: its store has not answered rank 1 for"]}
    ),
    "rank 1 is killed": Scenario({1: kill}, {0: ["OtherRankError: the process of rank 1 is gone"]}, AFTER_WORD_OF_IT),
    "rank 0 is killed": Scenario({0: kill}, {1: ["OtherRankError: the process of rank 0 is gone"]}, AFTER_WORD_OF_IT),
    "rank 1 fails": Scenario(
        {1: fail}, {0: [f"{FAILED} (at step 3, counting"], 1: ["ArithmeticError: boom"]}, AFTER_WORD_OF_IT
    ),
    "rank 1 fails with a collective under way": Scenario(
        {1: fail_with_a_collective_under_way}, {0: [FAILED], 1: ["ArithmeticError: boom"]}, AFTER_WORD_OF_IT
    ),
    "rank 1 fails without a text": Scenario(
        {1: fail_without_a_text}, {0: ["OtherRankError: rank 1 failed: Mute (at step 3"]}, AFTER_WORD_OF_IT
    ),
    "rank 1 fails with another connection": Scenario(
        {1: fail_as_if_a_connection_was_lost},
        {0: ["rank 1 failed: RuntimeError: Connection closed by peer (at step 3"], 1: ["RuntimeError: Connection cl"]},
        AFTER_WORD_OF_IT,
    ),
    **{
        f"rank {rank} wakes": Scenario({rank: fall_asleep}, {rank: [f"OtherRankError: the process of rank {rank} was"]})
        for rank in range(2)
    },
    "both fail alike": Scenario(dict.fromkeys(range(2), fail), {rank: ["ArithmeticError: boom"] for rank in range(2)}),
    "rank 1 fails while rank 0 is busy": Scenario({0: wait_for_a_fault, 1: fail}, {0: [FAILED]}, AFTER_WORD_OF_IT),
    "rank 1 fails while rank 0 is deaf": Scenario({0: be_deaf, 1: fail}),
    "rank 1 leaves": Scenario({1: leave}, {0: ["OtherRankError: rank 1 ended the run while rank 0 still waited"]}),
    "rank 1 does not come": Scenario(
        {1: sleep_long}, {0: [IN_VAIN, "rank 1: step 3, counting, in sleep_long"], 1: [IN_VAIN]}, options=NO_LIMIT
    ),
    "each waits for the other": Scenario(
        dict.fromkeys(range(2), wait_for_another_rank),
        {rank: [DEADLOCK, "recv <- wait_for_anoth"] for rank in range(2)},
    ),
    "the device of rank 1 hangs": Scenario(
        {1: hang_on_the_device}, {0: [DEADLOCK, "rank 1: step 3, counting, in hang_on", "device does not answer"]}
    ),
    "the device of rank 1 hangs, rank 0 is killed": Scenario({0: kill, 1: hang_on_the_device}),
}


def run_rank(*, rank, main_port, actions, file=None, limit=LIMIT, timeout=60.0):
    """Return the number of all-reduces that this rank has made."""
    init_process_group(
        backend="gloo", rank=rank, world_size=2, main_address="127.0.0.1", main_port=main_port,
        timeout=timedelta(seconds=timeout), init_method=file,
    )  # fmt: skip
    step = 0
    store = dist.PrefixStore("watch", cloned_store(dist.group.WORLD))
    watch = RunWatch(
        store, rank, 2, limit, lambda: {"step": step, "phase": "counting"}, lambda: print("LAST WORDS"), DEVICE.wait
    )
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
            raise watch.explain(error) from error
        watch.fail(error)
        raise
    finally:
        watch.stop()
    return step + 1


def play_scenarios(folder):
    """Play all scenarios at the same time, and return the outcomes of both ranks by name."""
    torch.set_num_threads(1)
    jobs = []
    for name, scenario in SCENARIOS.items():
        actions = {str(rank): action.__name__ for rank, action in scenario.actions.items()}
        settings = {"main_port": free_port(), "actions": actions, **scenario.options}
        if settings.pop("file", False):
            settings["file"] = f"file://{folder}/meeting"
        jobs += [{"rank": f"{name}/{rank}", "arguments": {**settings, "rank": rank}} for rank in range(2)]
    for job in jobs:
        (Path(folder) / f"{os.getpid()}-{job['rank']}").parent.mkdir(parents=True, exist_ok=True)
    rows = {row["rank"]: row for row in rank_server.run(run_rank, jobs, 80.0, Path(folder))}
    return {name: [rows[f"{name}/{rank}"] for rank in range(2)] for name in SCENARIOS}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    (played,) = run_processes(play_scenarios, 1, str(tmp_path_factory.mktemp("scenarios")), timeout=200)
    return played


@pytest.mark.parametrize("name", ["nothing", "rank 1 is slow", "each waits while bytes come"])
def test_ranks_that_only_take_their_time_are_left_alone(outcomes, name):
    for row in outcomes[name]:
        assert row["value"] == STEPS, row["output"]
        assert "stall report" not in row["output"]


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.errors])
def test_living_ranks_end_with_an_error_that_names_the_culprit(outcomes, name):
    scenario = SCENARIOS[name]
    for rank, parts in scenario.errors.items():
        row = outcomes[name][rank]
        assert not row["timed_out"], row["output"]
        assert row["seconds"] < scenario.within, row["output"]
        for part in parts:
            assert part in row["error"], row["error"] or row["output"]


def test_a_rank_waits_for_signs_of_life_for_as_long_as_the_limit_and_is_not_missed_after_its_end(outcomes):
    assert all(outcomes[name][0]["seconds"] > LIMIT for name in ("rank 1 is stopped", "rank 1 is stopped, file"))
    assert outcomes["rank 1 leaves"][1]["value"] == 3
    assert [outcomes[f"rank {rank} is killed"][rank]["exit_code"] for rank in range(2)] == [-9, -9]


@pytest.mark.parametrize(("name", "living"), [("rank 1 is stopped", 0), ("rank 0 is stopped", 1)])
def test_the_report_shows_every_rank_and_the_stack_of_its_own(outcomes, name, living):
    output = outcomes[name][living]["output"]
    assert output.count(f"stall report of rank {living} of 2") == 1
    rows = [line.split() for line in output.splitlines() if line[:1] in "01" and "counting" in line]
    assert [(row[0], row[3]) for row in rows] == [("0", "3"), ("1", "3")]
    assert "optimizer step phase stack location last heartbeat" in " ".join(output.split())
    assert "all_reduce <- run_rank (test_heartbeats_integration.py" in output
    assert "Python stack of the main thread" in output
    assert "dist.all_reduce(torch.ones(1))" in output
    assert "Restart the run from its last checkpoint" in output
    reports = [row["output"].count("===== stall report of") for row in outcomes["each waits for the other"]]
    assert reports == [1, 0]  # of the first rank
    assert "stall report" not in outcomes["rank 1 is stopped, no limit"][0]["output"]


def test_a_process_that_cannot_be_interrupted_is_ended_after_its_last_words(outcomes):
    row = outcomes["rank 1 fails while rank 0 is deaf"][0]
    assert row["exit_code"] == STALL_EXIT_CODE
    assert row["seconds"] < AFTER_WORD_OF_IT
    for part in ("rank 1 failed: ArithmeticError: boom", "time.sleep(60)", "LAST WORDS"):
        assert part in row["output"]


@pytest.mark.parametrize("name", ["the device of rank 1 hangs", "the device of rank 1 hangs, rank 0 is killed"])
def test_a_process_that_is_stuck_in_a_device_call_is_ended_with_a_report(outcomes, name):
    row = outcomes[name][1]
    assert row["exit_code"] == STALL_EXIT_CODE, row["output"]
    assert row["seconds"] < SOON
    assert "its device does not answer" in row["output"]

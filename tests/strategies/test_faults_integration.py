"""What becomes of training when a rank gets into trouble. One process imports everything and forks the ranks."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.conftest import skip
from tests.distributed.hosts import Hosts, reason_to_skip
from tests.strategies.faults import FAULTS, GO_ON, OF_LINKS, WHEN, Fault, become_subreaper, list_faults, run_fault
from tests.support.ports import free_port
from tests.support.processes import run_processes

LIMIT = 6.0  # seconds without a sign of life
MORE = 10.0  # seconds that all ranks may take beyond the limit
BUSY = 15.0  # seconds more on a busy machine
AT_ONCE = 3

FEW = [
    Fault("none", 0, "even"),
    Fault("kill -9", 1, "even"),
    Fault("SIGSTOP", 1, "even"),
    Fault("SIGSTOP", 0, "tail"),
    Fault("exception", 0, "tail"),
    Fault("exception", 1, "tail"),
    Fault("exception", 1, "validation"),
    Fault("vanished folder", 0, "even"),
    Fault("slow rank", 1, "even"),
]
CUT_LINKS = [Fault("link cut for 4 s", 1, "even"), Fault("link cut", 1, "validation")]
ALL = list_faults([kind for kind in FAULTS if kind not in OF_LINKS], list(WHEN))
SAID = {
    "kill -9": "the process of rank {rank} is gone",
    "SIGSTOP": "stalled",
    "exception": "rank {rank} failed: ArithmeticError: boom (at step ",
    "out of memory": "rank {rank} failed: RuntimeError: ",
    "full disk": "rank 0 failed: OSError: [Errno 28] no space left for the checkpoint",
    "vanished folder": "rank 0 failed: FileExistsError: ",
    "link cut": "stalled",
}
PHASES = {"even": "training, batch 2", "tail": "training, batch 6", "validation": "validation, batch 1"}


def play(faults, strategy="ddp_join"):
    """Run this rank's part of the faults one after another on children of this process, and return the outcomes."""
    become_subreaper()
    outcomes = []
    for fault in faults[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_fault(fault, Path(folder) / "run", LIMIT, strategy=strategy)
        outcomes.append(outcome)
    return outcomes


def check(outcome):
    fault, rows = outcome.fault, outcome.rows
    assert not any(row["timed_out"] for row in rows), "\n".join(row["output"] for row in rows)
    assert outcome.left == 0
    if fault.kind in GO_ON:
        assert [row["value"] for row in rows] == [{"steps": 16}] * 2, "\n".join(row["output"] for row in rows)
        return
    assert outcome.seconds < LIMIT + MORE + BUSY
    expected = SAID[fault.kind].format(rank=fault.rank)
    for row in outcome.living:
        if row["rank"] != fault.rank or fault.kind in OF_LINKS:
            assert row["error"].startswith("OtherRankError: "), row["output"]
            assert expected in row["error"]
        else:
            assert row["error"], row["output"]
    if fault.kind in ("exception", "out of memory"):
        assert PHASES[fault.phase] in outcome.said
    assert outcome.checkpoints > 0 or fault.phase == "even"
    assert not outcome.broken


@pytest.fixture(scope="module")
def few():
    by_process = run_processes(play, AT_ONCE, FEW, timeout=280)  # most of the time passes with waiting
    return {outcome.fault: outcome for outcomes in by_process for outcome in outcomes}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FEW, ids=str)
def test_all_ranks_end_soon_and_say_what_has_happened_or_go_on(few, fault):
    check(few[fault])


@pytest.mark.slow
def test_a_stall_report_names_step_phase_and_what_is_waited_for(few):
    outcome = few[Fault("SIGSTOP", 1, "even")]
    output = outcome.rows[0]["output"]
    assert "stall report of rank 0 of 2" in output
    assert output.count("training, batch 2") >= 2
    own = next(line for line in output.splitlines() if line.startswith("0 "))
    assert "wait_for_gradients (bucket_transport.py" in own
    other = next(line for line in output.splitlines() if line.startswith("1 "))
    assert "_act (faults.py" in other
    stack = output.partition("Python stack")[2].partition("ends now")[0]
    assert "bucket_transport.py" in stack
    assert "work.wait()" in stack


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp_join", "ddp_checkpoint"])
@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind not in OF_LINKS])
def test_every_fault_on_every_rank_in_every_phase(kind, strategy):
    (outcomes,) = run_processes(play, 1, [fault for fault in ALL if fault.kind == kind], strategy, timeout=290)
    for outcome in outcomes:
        check(outcome)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    reason = reason_to_skip()
    if reason:
        skip(f"no hosts of network namespaces: {reason}")
    made = Hosts(2, tmp_path_factory.mktemp("hosts"))
    yield made
    made.close()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.slow if fault in CUT_LINKS else pytest.mark.exhaustive, id=str(fault))
        for fault in list_faults(OF_LINKS, ["even", "validation"], [1])
    ],
)
def test_a_link_that_is_cut(fault, hosts, tmp_path):
    limit = 2 * LIMIT if fault.kind in GO_ON else LIMIT  # TCP sends again after twice as long each time
    check(run_fault(fault, tmp_path / "run", limit, hosts, free_port()))

"""What the benchmark of faults makes of outcomes; the faults themselves are in `test_faults_integration`."""

import io

from measuring.faults import make_fault_table
from rich.console import Console

from tests.strategies.fault_runs import Fault, FaultOutcome


def row(rank, error="", value=None, timed_out=False):
    return {"rank": rank, "error": error, "value": value, "timed_out": timed_out, "output": ""}


KILLED = Fault("kill -9", 1, "tail")
ENDED = [row(0, "OtherRankError: the process of rank 1 is gone"), row(1)]
DONE = [row(0, value={"steps": 16}), row(1, value={"steps": 16})]


def test_an_outcome_is_right_if_nothing_hung_broke_or_stayed():
    slow = Fault("slow rank", 1, "tail")
    right = [FaultOutcome(KILLED, 2.0, ENDED, 3, []), FaultOutcome(slow, 2.0, DONE, 3, [])]
    wrong = [
        FaultOutcome(KILLED, None, ENDED, 3, []),
        FaultOutcome(KILLED, 2.0, ENDED, 3, ["last.ckpt"]),
        FaultOutcome(KILLED, 2.0, ENDED, 3, [], left=1),
        FaultOutcome(KILLED, 2.0, DONE, 3, []),
        FaultOutcome(slow, 2.0, ENDED, 3, []),
    ]
    assert [outcome.is_right for outcome in (*right, *wrong)] == [True] * 2 + [False] * 5


def test_the_table_has_a_row_for_every_fault():
    outcomes = [
        FaultOutcome(KILLED, 2.04, ENDED, 3, []),
        FaultOutcome(Fault("SIGSTOP", 0, "even"), None, ENDED, 1, ["half.ckpt"], left=2),
        FaultOutcome(Fault("slow rank", 1, "even"), 9.0, DONE, 8, []),
    ]
    console = Console(file=io.StringIO(), width=190)
    console.print(make_fault_table(outcomes, 6.0))
    text = console.file.getvalue()
    assert "stall limit of 6 s: 2 of 3 as promised" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["kill"], ["SIGSTOP"], ["slow"])]
    assert rows[0][:6] == ["kill", "-9", "1", "tail", "2.0", "3"]
    assert " ".join(rows[1]) == "SIGSTOP 0 even hung broken: half.ckpt 2 the process of rank 1 is gone"
    assert rows[2][-2:] == ["(training", "completed)"]

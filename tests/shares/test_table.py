"""Shares that follow the speed of the ranks, in one process; the answers of the ranks are prepared."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lightning_ddp_ext.batches.chunk_sizes import ChunkRule
from lightning_ddp_ext.ranks.sample_counts import SharedBatch
from lightning_ddp_ext.reducer.control import StepControl
from lightning_ddp_ext.shares.table import ShareBalancer, ShareTable

RULE = ChunkRule(None, None, "auto")


class Run:
    """Batches of 12 samples for two ranks; `exchange` answers with these times of the step that was sent."""

    def __init__(self, rule=RULE):
        self.said = []
        self.balancer = ShareBalancer(rule, 2, torch.device("cpu"), self.said.append)
        self.table, self.control = ShareTable(RULE, 2), StepControl()
        self.balancer.undrawn[self.table] = lambda: self.table.begun + 3

    def begin(self, number, table=None):
        self.balancer.begin_batch(table or self.table, SharedBatch(number, (6, 6), 40 + number, (6, 6)))

    def exchange(self, seconds=(0.0, 0.0), most=(-1, -1), ends_step=True, has_samples=True):
        @contextmanager
        def synchronizing():
            yield
            timed = [self.control.timed] * 2
            self.control.exchanged = SimpleNamespace(timed=timed, seconds=seconds, most_samples=most)

        with self.balancer.exchange(synchronizing(), self.control, ends_step):
            if has_samples:
                self.balancer.start()

    def division(self):
        return self.table.division(self.table.begun + 3, True).divide(12, None).sizes


def test_shares_follow_times_from_the_first_batch_that_no_rank_has_drawn():
    run = Run()
    for number in range(10):
        run.begin(number)
        run.balancer.count_batch(run.control)
        assert run.control.drawn == run.balancer.current[1].agreement
        run.exchange(seconds=(4.0, 1.0))
        assert len(run.balancer.take_timed()) == run.control.timed - number == 1
    (decision,) = run.said
    assert decision.startswith('`balance="auto"`, batch 8: 6, 6 -> ')
    assert run.table.held_from == 8 + 3
    assert run.division()[0] < 4
    resumed = Run()
    assert resumed.balancer.load_state_dict(run.balancer.state_dict())
    assert resumed.balancer.controller.shares == run.balancer.controller.shares


def test_limits_of_memory_hold_at_once_and_without_a_rule_nothing_changes():
    for rule, said, sizes in ((RULE, ["8 on rank 0"], (8, 4)), (None, [], (6, 6))):
        run = Run(rule)
        run.begin(0)
        if rule is not None:
            run.balancer.controller.shares = [0.9, 0.1]
        for _ in range(2):
            run.exchange(most=(8.0, -1.0))
        assert [one.rpartition("memory: ")[2] for one in run.said] == [f"{one}." for one in said]
        assert run.division() == sizes
        assert (run.balancer.state_dict() is None) == (rule is None)


def test_a_batch_is_part_of_one_step_although_an_evaluation_interrupts_it():
    run = Run()
    run.begin(0)
    outer = run.balancer.current
    for is_last in (False, True):
        run.balancer.count_batch(run.control)
        run.balancer.start()
        run.begin(7, ShareTable(RULE, 2))  # forgets the measurement
        run.balancer.current = outer
        run.exchange(ends_step=is_last, has_samples=not is_last)
        assert run.balancer.stop() == (not is_last)
    (step,) = run.balancer.take_timed()
    assert [batch.number for batch in step.batches] == [0]
    assert len(step.timers) == 1
    run.exchange()  # a step without a batch is none
    assert run.balancer.take_timed() == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_shares_are_even_under_deterministic_algorithms(ranks):
    said = []
    torch.use_deterministic_algorithms(True)
    try:
        balancer = ShareBalancer(RULE, ranks, torch.device("cpu"), said.append)
    finally:
        torch.use_deterministic_algorithms(False)
    assert balancer.controller is None
    assert len(said) == ranks - 1

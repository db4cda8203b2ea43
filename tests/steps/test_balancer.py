"""Shares that follow the speed of the ranks, in one process; the answers of the ranks are prepared."""

from contextlib import nullcontext

import pytest
import torch

from lightning_ddp_ext.batches.chunk_sizes import ChunkRule
from lightning_ddp_ext.errors import BatchSplitError
from lightning_ddp_ext.shares.share_table import SharedBatch, ShareTable, check_shares
from lightning_ddp_ext.steps.balancer import ShareBalancer

RULE = ChunkRule(None, None, "auto")


class Run:
    """Batches of 12 samples for two ranks; `exchange` answers with these times of the step that was sent."""

    def __init__(self, rule=RULE):
        self.said = []
        self.balancer = ShareBalancer(rule, 2, torch.device("cpu"), self.said.append)
        self.table = self.add(3)

    def add(self, lead):
        table = ShareTable(RULE, 2)
        table.lead = lead
        self.balancer.add(table)
        return table

    def begin(self, number, table=None):
        shared = SharedBatch(table or self.table, number, (6, 6), 40 + number, (6, 6))
        self.balancer.begin_batch(shared)
        return shared

    def count(self, shared):
        self.balancer.count_batch(shared)
        assert self.balancer._drawn.value == shared.agreement

    def exchange(self, seconds=(0.0, 0.0), most=(-1, -1), ends_step=True, has_samples=True):
        balancer = self.balancer
        if has_samples:
            balancer.start()
        balancer.send(ends_step)
        balancer._timed.of_ranks = [balancer._timed.value] * 2
        balancer._seconds.of_ranks, balancer._most_samples.of_ranks = seconds, most
        balancer.receive()

    def division(self):
        return self.table.division(self.table.begun + 3, True).divide(12, None).sizes


def test_shares_follow_times_from_the_first_batch_that_no_rank_has_drawn():
    run = Run()
    for number in range(10):
        run.count(run.begin(number))
        run.exchange(seconds=(4.0, 1.0))
        assert len(run.balancer.take_timed()) == run.balancer._timed.value - number == 1
    (decision,) = run.said
    assert decision.startswith('`balance="auto"`, batch 8: from 6, 6 to ')
    assert run.table.held_from == 8 + 3
    assert run.division()[0] < 4
    resumed = Run()
    assert resumed.balancer.load_state_dict(run.balancer.state_dict())
    assert resumed.balancer.controller.shares == run.balancer.controller.shares


def test_limits_of_memory_hold_at_once_and_without_a_rule_nothing_changes():
    for rule, said, sizes in ((RULE, ["8 on rank 0"], (8, 4)), (None, [], (6, 6))):
        run = Run(rule)
        if rule is not None:
            run.balancer.controller.shares = [0.9, 0.1]
        for number in range(2):
            run.count(run.begin(number))
            run.exchange(most=(8.0, -1.0))
        assert [one.rpartition("memory: ")[2] for one in run.said] == [f"{one}." for one in said]
        assert run.division() == sizes
        assert (run.balancer.state_dict() is None) == (rule is None)


def test_a_batch_is_part_of_one_step_although_an_evaluation_interrupts_it():
    run = Run()
    outer = run.begin(0)
    run.balancer.start()
    for _ in range(2):
        with run.balancer.interrupted():
            assert not run.balancer.stop()
            run.begin(7, ShareTable(RULE, 2))
            run.balancer.start()
    for is_last in (False, True):
        run.count(outer)
        run.exchange(ends_step=is_last)
    (step,) = run.balancer.take_timed()
    assert [batch.number for batch in step.batches] == [0]
    assert len(step.timers) == 3  # before, between and after the evaluations
    run.exchange()  # a step without a batch is none
    assert run.balancer.take_timed() == []
    run.begin(1)
    assert not run.balancer.stop()
    with run.balancer.interrupted():
        pass
    assert not run.balancer.stop()  # a rank without samples is not measured


def test_a_step_that_a_rank_has_not_measured_decides_nothing():
    run = Run()
    for number in range(20):
        run.count(run.begin(number))
        run.exchange(seconds=(4.0, 0.0))
    assert run.said == []


def test_tables_of_the_same_steps_change_in_the_same_step_and_a_later_one_begins_with_the_present_shares():
    run = Run()
    other = run.add(0)
    for number in range(10):
        run.begin(number, other)
        run.count(run.begin(number))
        run.exchange(seconds=(4.0, 1.0))
    assert run.table.held_from == other.held_from == 8 + 3
    assert run.add(0).division(0, True).divide(12, None).sizes == run.division()


@pytest.mark.parametrize("rule", [ChunkRule(None, None, "even"), RULE])
def test_batches_of_a_step_need_equal_sizes_or_fixed_proportions(rule):
    def batches(*sizes):
        return [SharedBatch(ShareTable(rule, 2), 0, one, 0, one) for one in sizes]

    check_shares(batches((2, 6), (2, 6)))
    for sizes, is_right in (((1, 3), not rule.is_auto), ((2, 5), False), ((0, 4), False)):
        with nullcontext() if is_right else pytest.raises(BatchSplitError, match="but a rank has one weight"):
            check_shares(batches((2, 6), sizes))
    with pytest.raises(BatchSplitError, match="a batch has no samples"):
        check_shares(batches((0, 0)))


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

"""Sizes of the ranks' shares of a batch."""

import pytest

from lightning_ddp_ext.batches.balance_controller import BalanceController
from lightning_ddp_ext.batches.chunk_sizes import ChunkRule
from lightning_ddp_ext.errors import BatchSplitError
from lightning_ddp_ext.shares.share_table import ShareTable


def test_two_samples_for_batch_normalisation_respect_the_limits_and_keep_a_slow_rank():
    table = ShareTable(ChunkRule(None, None, "auto"), 2, avoids_single_samples=True)
    table.change(0, [0.9, 0.1], [8, None])
    assert table.division(0, True).divide(9, None).sizes == (7, 2)
    assert table.division(0, False).divide(9, None).sizes == (8, 1)  # evaluation takes single samples
    table.change(1, [0.99, 0.01], [None, None])
    assert table.division(1, True).divide(16, None).sizes == (14, 2)


def test_a_controller_that_knows_the_two_samples_settles_on_a_slow_rank():
    moves = {1: 0, 2: 0}
    for least in moves:
        controller, table = BalanceController(2), ShareTable(ChunkRule(None, None, "auto"), 2, True)
        controller.least_samples = least
        for number in range(60):
            table.change(number, controller.shares, controller.limits)
            sizes = table.division(number, True).divide(16, None).sizes
            decision = controller.observe(sizes, [0.001 * sizes[0], 0.1 * sizes[1]])
            moves[least] += decision is not None and decision.before != decision.after
    assert moves[2] == 1  # to 14, 2
    assert moves[1] > 3


def test_a_batch_size_is_refused_that_leaves_a_rank_without_two_samples():
    rule = ChunkRule(None, None, "even")
    ShareTable(rule, 2, avoids_single_samples=False).check_batch_size(2)
    with pytest.raises(BatchSplitError, match="rank 0 never gets a sample: batches of 2 are shared as"):
        ShareTable(rule, 2, avoids_single_samples=True).check_batch_size(2)

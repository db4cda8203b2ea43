import random

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ddp_ext import TokenBudgetBatchSampler


def test_batches_fill_the_budget_and_hold_every_sequence_once():
    generator = random.Random(0)
    for is_padded in (True, False):
        lengths = [generator.randint(1, 40) for _ in range(200)]
        sampler = TokenBudgetBatchSampler(lengths, 100, is_padded)
        epochs = []
        for epoch in range(2):
            sampler.sampler.set_epoch(epoch)
            batches = list(sampler)
            assert len(batches) == len(sampler) == len(DataLoader(lengths, batch_sampler=sampler))
            assert sorted(index for batch in batches for index in batch) == list(range(200))
            tokens = []
            for batch in batches:
                sizes = [lengths[index] for index in batch]
                tokens.append(max(sizes) * len(sizes) if is_padded else sum(sizes))
            assert max(tokens) <= 100
            assert sum(tokens) / len(tokens) > 75
            epochs.append(batches)
        assert epochs[0] != epochs[1]
        assert list(TokenBudgetBatchSampler(lengths, 100, is_padded)) == epochs[0]
        assert list(TokenBudgetBatchSampler(torch.tensor(lengths), 100, is_padded, seed=1)) != epochs[0]


def test_without_shuffling_batches_are_in_the_order_of_their_lengths():
    assert list(TokenBudgetBatchSampler([3, 1, 2, 1], 4, shuffle=False)) == [[1, 3], [2], [0]]
    assert list(TokenBudgetBatchSampler([3, 1, 2, 1], 4, is_padded=False, shuffle=False)) == [[1, 3, 2], [0]]


def test_sequences_that_cannot_be_in_a_batch_are_refused():
    for lengths, message in (
        ([], r"`lengths` must be a sequence of numbers of tokens, got the shape \[0\]"),
        ([[1]], r"got the shape \[1, 1\]"),
        ([2, 0], "got 0 for sequence 1"),
        ([2, 9, 3], "`max_tokens` is 8, and sequence 1 has 9 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenBudgetBatchSampler(lengths, 8)

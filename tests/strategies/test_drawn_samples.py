"""Batches of any form are weighted by the samples that their loader draws, and it is an error if it draws none."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from tests.parity.models import Transposed, collate
from tests.parity.rows import Damaged
from tests.strategies.toolkit import RANK, STRATEGIES, fit


def loader(*numbers, is_ready=False):
    """Load batches of samples, of which the first dimension of the features is not the number."""
    batches = torch.arange(sum(numbers)).split(numbers)
    if is_ready:
        return DataLoader([collate([Damaged()[index] for index in batch]) for batch in batches], batch_size=None)
    return DataLoader(Damaged(), batch_sampler=[batch.tolist() for batch in batches], collate_fn=collate)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_cannot_count_its_samples_ends_training_on_all_ranks_before_the_first_step(strategy):
    with pytest.raises(Exception, match="needs numbers of samples") as caught:  # on rank 1
        fit(Transposed().double(), loader(2, 3, 2, is_ready=RANK == 1), strategy=strategy)
    error = f"{caught.type.__name__}: {caught.value}"
    if RANK == 1:
        assert error.startswith('ValueError: rank 1: `weight_by="samples"`')
        assert error.endswith('or `weight_by="equal"` if batches are equally large on all ranks.')
    else:
        assert error.startswith("OtherRankError: rank 1 failed: ValueError: rank 1: `weight_by")
        assert "at step 0, training, batch 0" in error


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_number_that_was_drawn_for_a_batch_ends_with_it(strategy):
    within, after = [], []

    class Asking(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            within.append(trainer.strategy.count_samples(batch))

        def on_train_epoch_end(self, trainer, module):
            after.append(trainer.strategy.count_samples(torch.zeros(5, 3)))

    made_by_user = loader(9, 9, 4)
    made, _ = fit(Transposed(), made_by_user, callbacks=[Asking()], strategy=strategy, devices=1)
    assert within == [9, 9, 4]  # not 5, the number of features
    assert after == [5]
    assert made.train_dataloader is made_by_user  # on one rank

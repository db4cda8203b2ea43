"""Batches of any form are weighted by the samples that their loader draws, and it is an error if it draws none."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from tests.parity.models import Transposed, collate
from tests.parity.rows import Damaged
from tests.strategies.toolkit import RANK, STRATEGIES, fit, run_on_ranks


def loader(*numbers, is_ready=False):
    """Load batches of samples, of which the first dimension of the features is not the number."""
    batches = torch.arange(sum(numbers)).split(numbers)
    if is_ready:
        return DataLoader([collate([Damaged()[index] for index in batch]) for batch in batches], batch_size=None)
    return DataLoader(Damaged(), batch_sampler=[batch.tolist() for batch in batches], collate_fn=collate)


def fail(strategy: str, folder: str) -> str:
    """Return the error of this rank in a training of which only rank 1 cannot count the samples."""
    try:
        fit(Transposed().double(), loader(2, 3, 2, is_ready=RANK == 1), strategy=strategy)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_cannot_count_its_samples_ends_training_on_all_ranks_before_the_first_step(strategy):
    other, own = run_on_ranks(2, {"": partial(fail, strategy)})[""]
    assert own.startswith('ValueError: rank 1: `weight_by="samples"` needs numbers of samples')
    assert own.endswith('or `weight_by="equal"` if batches are equally large on all ranks.')
    assert other.startswith("OtherRankError: rank 1 failed: ValueError: rank 1: `weight_by")
    assert "at step 0, training, batch 0" in other


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

"""`ddp_join` on two ranks whose loaders have fewer batches than they announce, or other numbers in each epoch."""

from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext import DDPJoinStrategy, UnevenInputsError
from lightning_ddp_ext.loaders import lockstep_source
from tests.strategies.toolkit import RANK, Classifier, SizedStream, assert_identical, fit, gather, loader, samples

pytestmark = pytest.mark.slow
MORE = 3  # samples or batches that are announced and missing


def stream(*counts: int, missing: int = 2 * MORE, **options: Any) -> DataLoader:
    items = list(loader(*counts).dataset)
    return DataLoader(SizedStream(items, len(items) + missing), batch_size=2, **options)


@pytest.mark.ranks(2)
def test_workers_drop_their_incomplete_batches() -> None:
    """Six samples of each rank make one batch of two for each of two workers, of the three that are announced."""
    seen = []
    for options in ({}, {"prefetch": 2}):
        module = Classifier()
        data = stream(6, 6, missing=0, num_workers=2, drop_last=True)
        with mock.patch.object(lockstep_source, "rank_zero_warn") as said:
            _, trace = fit(module, data, strategy=DDPJoinStrategy(**options), max_epochs=2)
        assert_identical(trace.digests)
        assert said.call_args.args[0].startswith(
            "ranks 0, 1: the loader announced 3 batches and ended after 2. The run"
        )
        assert said.call_count == 1
        assert len(trace.digests) == 4
        assert not any(trace.is_shadow)
        seen.append(module.seen)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 4


@pytest.mark.ranks(2)
def test_longer_loaders_end_where_the_trainer_ends() -> None:
    """Announces one batch; each rank has more."""
    module = Classifier()
    _, trace = fit(module, stream(8, 6, missing=-5), max_epochs=2)
    assert_identical(trace.digests)
    assert len(trace.digests) == 2 * len(stream(8, 6, missing=-5)) or RANK == 1
    assert len(trace.digests) == 2 * 2


@pytest.mark.ranks(2)
def test_the_other_rules_for_uneven_inputs() -> None:
    module = Classifier()
    _, trace = fit(module, stream(8, 4), strategy=DDPJoinStrategy(uneven_inputs="stop"))
    assert_identical(trace.digests)
    assert len(module.seen) == 4
    with pytest.raises(UnevenInputsError, match="rank 1 ran out of data after batch 2, other ranks have more"):
        fit(Classifier(), stream(8, 4, missing=2 + 4 * RANK), strategy=DDPJoinStrategy(uneven_inputs="error"))


class Sized(Dataset):
    """A dataset that the module makes larger or smaller."""

    def __init__(self, size: int) -> None:
        self.size, self.columns = size, samples(40)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return tuple(column[index] for column in self.columns)


SIZES = [(9, 5, 1, 7), (6, 0, 11, 3)]


@pytest.mark.ranks(2)
def test_datasets_grow_and_shrink() -> None:
    """Sizes are changed by a hook; before the first epoch, they are 12."""

    class Changing(Classifier):
        def on_train_epoch_start(self) -> None:
            data.size = sizes[self.trainer.current_epoch]
            self.seen.append([])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen[-1] += batch[2].tolist()
            return self.loss(batch)

    for sizes in SIZES:
        for own in (None, torch.utils.data.RandomSampler):
            data = Sized(12)
            given = DataLoader(data, 2, shuffle=own is None, sampler=own and own(data))
            module = Changing()
            _, trace = fit(module, given, max_epochs=4, use_distributed_sampler=True)
            assert_identical(trace.digests)
            for size, of_ranks in zip(sizes, zip(*gather(module.seen), strict=True), strict=True):
                assert sorted(chain(*of_ranks)) == list(range(size))


@pytest.mark.ranks(2)
def test_a_stream_that_grows_is_used_whole_or_warned_of() -> None:
    """It has two batches on each rank, then three on rank 1."""

    class Growing(Classifier):
        def on_train_epoch_end(self) -> None:
            data.dataset.items, data.dataset.length = (items, len(items)) if RANK else (items[:4], 4)

    for options in ({}, {"reload_dataloaders_every_n_epochs": 1}):
        data = stream(6, 6, missing=0)
        items = data.dataset.items
        data.dataset.items, data.dataset.length = items[:4], 4
        module = Growing()
        with mock.patch.object(lockstep_source, "rank_zero_warn") as warn:
            _, trace = fit(module, data, max_epochs=2, **options)
        assert_identical(trace.digests)
        assert len(trace.digests) == 4 + len(options)
        assert warn.called != bool(options)
        assert options or "a loader has 3 batches now, and had 2 when the Trainer asked" in warn.call_args.args[0]

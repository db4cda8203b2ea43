"""Fails when a private name of torch's `DataLoader` moves. Counting itself is tested in `tests/data`."""

import inspect

from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torchs

from lightning_ddp_ext._compat import torch as torch_loaders


def test_iterators_have_the_names_that_count():
    for kind in (torchs._SingleProcessDataLoaderIter, torchs._MultiProcessingDataLoaderIter):
        assert "self._next_data()" in inspect.getsource(kind.__mro__[1].__next__)
        assert "_next_data" in vars(kind)
    loader = DataLoader(range(3), 2)
    batches = torch_loaders.iterate_counting(loader, lambda samples, batch, batch_size: len(samples))
    assert isinstance(batches._collate_fn, torch_loaders._CountingCollate)
    assert isinstance(batches, torchs._SingleProcessDataLoaderIter)
    assert len(next(batches)) == torch_loaders.samples_of(batches) == 2


def test_the_methods_that_make_iterators_are_torchs():
    assert DataLoader.__iter__.__module__ == DataLoader._get_iterator.__module__ == "torch.utils.data.dataloader"
    assert torch_loaders._has_torchs_iterator(DataLoader(range(3)))
    assert "self._get_iterator()" in inspect.getsource(DataLoader.__iter__)

"""Samplers that give every sample to exactly one rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from lightning_ddp_ext.loaders.samplers import UnpaddedDistributedSampler


@given(size=st.integers(0, 40), world_size=st.integers(1, 7), shuffle=st.booleans(), epoch=st.integers(0, 3))
def test_ranks_share_all_samples_out_in_torchs_order(size, world_size, shuffle, epoch):
    dealt = []
    for rank in range(world_size):
        sampler = UnpaddedDistributedSampler(range(size), world_size, rank, shuffle=shuffle, seed=3)
        sampler.set_epoch(epoch)
        dealt.append(list(sampler))
        assert len(dealt[-1]) == len(sampler)
        if size:
            padded = DistributedSampler(range(size), world_size, rank, shuffle=shuffle, seed=3)
            padded.set_epoch(epoch)
            assert dealt[-1] == list(padded)[: len(sampler)]
    assert sorted(sample for samples in dealt for sample in samples) == list(range(size))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_a_sampler_is_replaced_in_place_unless_it_drops_samples():
    sampler = DistributedSampler(range(5), 2, 1, shuffle=False)
    assert list(sampler) == [1, 3, 0]
    UnpaddedDistributedSampler.replace(sampler)
    assert list(sampler) == [1, 3]
    assert len(sampler) == 2
    with pytest.raises(ValueError, match="`drop_last=True` drops samples"):
        UnpaddedDistributedSampler(range(5), 2, 0, drop_last=True)

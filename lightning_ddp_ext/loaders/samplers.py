"""Samplers that give every sample to exactly one rank."""

from collections.abc import Iterator, Sequence, Sized
from typing import Any, cast

import torch
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loaders import is_sampler_wrapper, wrapped_sampler
from lightning_ddp_ext.resume.rng_state import drawing_alike


class UnpaddedDistributedSampler(DistributedSampler[Any]):
    """`torch.utils.data.DistributedSampler` without padding and dropping: some ranks get one sample less, or none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.drop_last:
            raise ValueError("`drop_last=True` drops samples, which this sampler never does. Leave it out.")

    @classmethod
    def replace(cls, sampler: DistributedSampler[Any]) -> None:
        """Turn a sampler into one of this class in place, since loaders refer to their samplers."""
        sampler.__class__ = cls
        sampler.rank = int(sampler.rank)  # no longer the mark of an injected sampler

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(self._indices(len(cast(Sized, self.dataset))))

    @override
    def __len__(self) -> int:  # of the dataset as it is now, since it may grow or shrink
        return len(range(self.rank, len(cast(Sized, self.dataset)), self.num_replicas))

    def _indices(self, size: int) -> list[int]:
        order: Sequence[int] = range(size)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(size, generator=generator).tolist()
        return list(order[self.rank :: self.num_replicas])


class UnpaddedSamplerWrapper(UnpaddedDistributedSampler):
    """Deals out the samples that a user's sampler draws, in its order; Lightning's wrapper pads and shuffles them."""

    @override
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        sampler = wrapped_sampler(self)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)

    @override
    def __iter__(self) -> Iterator[Any]:
        # All ranks have to draw the same order, but their RNG states diverge once a rank runs out of data.
        with drawing_alike((self.seed + self.epoch) % 2**32, wrapped_sampler(self)):
            drawn = list(wrapped_sampler(self))  # maybe not as many as the sampler announces
        return (drawn[index] for index in self._indices(len(drawn)))


class LightningInjectedRank(int):
    """A rank passed to the samplers that Lightning injects, which distinguishes them from the user's samplers."""


def disable_sampler_padding(loader: object) -> None:
    """Make the sampler that Lightning has injected into a loader deal out every sample exactly once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
        is_wrapper = is_sampler_wrapper(sampler)
        # Users may pass `trainer.distributed_sampler_kwargs` to their sampler class, which stays.
        if not isinstance(sampler, DistributedSampler) or not (is_wrapper or type(sampler) is DistributedSampler):
            continue
        if isinstance(sampler.rank, LightningInjectedRank):
            kind = UnpaddedSamplerWrapper if is_wrapper else UnpaddedDistributedSampler
            sampler.shuffle = sampler.shuffle and not is_wrapper
            kind.replace(sampler)

"""Every sample exactly once."""

from collections.abc import Iterator, Sequence, Sized
from typing import Any, cast

import torch
from torch.utils.data import DistributedSampler
from typing_extensions import override


class UnpaddedDistributedSampler(DistributedSampler[Any]):
    """Deals samples out to the ranks, without padding and without dropping any: ranks may get one sample less.

    Order, seed and epoch are those of `torch.utils.data.DistributedSampler`, whose arguments it takes; ranks get the
    same samples as from that one, but for the padding. A rank may get none.

    Raises:
        ValueError: If `drop_last` is set, or the rank is out of range.
    """

    _dealt: Sequence[Sequence[int]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.drop_last:
            raise ValueError("`drop_last=True` drops samples, which this sampler never does. Leave it out.")
        self._count()

    @classmethod
    def take_over(cls, sampler: DistributedSampler[Any], rank: int, num_replicas: int) -> None:
        """Turn a sampler into one that neither pads nor drops, in place: loaders refer to their samplers."""
        sampler.__class__ = cls
        sampler.rank, sampler.num_replicas = rank, num_replicas
        cast(UnpaddedDistributedSampler, sampler)._count()

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(self._indices())

    def leave_out(self, dealt: Sequence[Sequence[int]]) -> None:
        """Deal out only what is left of an epoch, which may have begun on another number of ranks.

        Args:
            dealt: For each part of the epoch, how many samples each of its ranks has taken.
        """
        self._dealt = dealt
        self._count()

    def _indices(self) -> list[int]:
        order: Sequence[int] = range(len(cast(Sized, self.dataset)))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        for taken in self._dealt:
            ranks = len(taken)
            order = [index for place, index in enumerate(order) if place // ranks >= taken[place % ranks]]
        return list(order[self.rank :: self.num_replicas])

    def _count(self) -> None:
        size = len(cast(Sized, self.dataset)) - sum(map(sum, self._dealt))
        self.num_samples = len(range(self.rank, size, self.num_replicas))
        self.total_size = size

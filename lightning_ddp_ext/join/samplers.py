"""Samplers that give every sample to exactly one rank."""

import itertools
import math
from collections.abc import Iterator, Sequence, Sized
from numbers import Real
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


_TOLERANCE = 1e-6


def check_fractions(fractions: Sequence[float], num_replicas: int | None = None) -> None:
    """Check the value of a `train_fractions` argument.

    Args:
        fractions: The share of each rank.
        num_replicas: Number of ranks, if it is known.

    Raises:
        TypeError: If it is no list.
        ValueError: If a fraction is not a number between 0 and 1, if they do not add up to 1, or if there is not one
            per rank.
    """
    if isinstance(fractions, str) or not isinstance(fractions, Sequence):
        raise TypeError(f"`train_fractions` must be a list of numbers, got {fractions!r}. Use for example [0.7, 0.3].")
    given = list(fractions)
    if not all(isinstance(fraction, Real) and 0 <= fraction <= 1 for fraction in given):
        raise ValueError(f"`train_fractions` must be between 0 and 1, got {given}. Use for example [0.7, 0.3].")
    if not math.isclose(sum(given), 1.0, abs_tol=_TOLERANCE):
        raise ValueError(
            f"`train_fractions` must add up to 1, got {given}, which adds up to {sum(given):g}. Use for example"
            " [0.7, 0.3]."
        )
    if num_replicas is not None and len(given) != num_replicas:
        processes = f"{num_replicas} process{'es' if num_replicas > 1 else ''}"
        raise ValueError(
            f"`train_fractions` must have one number per process, got {given} for {processes}. Leave it out to share"
            " evenly, or start as many processes with `ddp_join`."
        )


class FractionSampler(DistributedSampler[Any]):
    """Deals a consecutive part of the data out to each rank; every sample belongs to exactly one rank.

    Being a `DistributedSampler`, it is left alone by Lightning, which also tells it the epoch.

    Args:
        dataset: The data of all ranks.
        fractions: The share of each rank; parts end at the nearest whole sample.
        num_replicas: Number of ranks; by default that of the process group.
        rank: This rank; by default that of the process group.
        shuffle: Whether each rank draws its samples in a new order in every epoch.
        seed: Seed of the order.

    Attributes:
        part: The indices of this rank.

    Raises:
        ValueError: See `check_fractions`.
    """

    def __init__(
        self,
        dataset: Sized,
        fractions: Sequence[float],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(cast(Any, dataset), num_replicas, rank, shuffle, seed)
        check_fractions(fractions, self.num_replicas)
        edges = [round(len(dataset) * edge) for edge in itertools.accumulate(fractions, initial=0.0)]
        edges[-1] = len(dataset)
        self.part = range(edges[self.rank], edges[self.rank + 1])
        self.num_samples = len(self.part)
        self.total_size = len(dataset)

    @override
    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(self.part)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.part), generator=generator).tolist()
        return iter([self.part[index] for index in order])

"""Samplers that give every sample to exactly one rank."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence, Sized
from numbers import Real
from typing import Any, cast

import numpy
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loaders import is_sampler_wrapper, wrapped_sampler
from lightning_ddp_ext.resume.rng_state import capture_states, find_loader_rngs, restore_states, seed_all


class UnpaddedDistributedSampler(DistributedSampler[Any]):
    """`torch.utils.data.DistributedSampler` without padding and dropping: some ranks get one sample less, or none."""

    _dealt: Sequence[Sequence[int]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.drop_last:
            raise ValueError("`drop_last=True` drops samples, which this sampler never does. Leave it out.")
        self._update_length()

    @classmethod
    def replace(cls, sampler: DistributedSampler[Any], rank: int, num_replicas: int) -> None:
        """Turn a sampler into one of this class in place, since loaders refer to their samplers."""
        sampler.__class__ = cls
        sampler.rank, sampler.num_replicas = rank, num_replicas
        cast(UnpaddedDistributedSampler, sampler)._update_length()

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(self._indices())

    def skip_dealt(self, dealt: Sequence[Sequence[int]]) -> None:
        """Deal out the rest of an epoch, given the number of samples of each rank in each earlier part of the epoch.

        The parts may have had other numbers of ranks.
        """
        self._dealt = dealt
        self._update_length()

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

    def _update_length(self) -> None:
        size = len(cast(Sized, self.dataset)) - sum(map(sum, self._dealt))
        self.num_samples = len(range(self.rank, size, self.num_replicas))
        self.total_size = size


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
        generators = find_loader_rngs([wrapped_sampler(self)])
        states = capture_states(generators)
        with isolate_rng():
            seed = (self.seed + self.epoch) % 2**32
            random.seed(seed)
            numpy.random.seed(seed)
            torch.manual_seed(seed)
            seed_all(generators, seed)
            cast(Any, self.dataset).reset()  # draws a new order
        restore_states(generators, states)
        return (self.dataset[index] for index in self._indices())


class LightningInjectedRank(int):
    """A rank passed to the samplers that Lightning injects, which distinguishes them from the user's samplers."""

    rank: int
    world_size: int

    def __new__(cls, rank: int, world_size: int = 1, value: int | None = None) -> "LightningInjectedRank":  # noqa: D102
        created = super().__new__(cls, rank if value is None else value)
        created.rank, created.world_size = rank, world_size
        return created


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
            kind.replace(sampler, sampler.rank.rank, sampler.rank.world_size)


_TOLERANCE = 1e-6


def check_fractions(fractions: Sequence[float], num_replicas: int | None = None) -> None:
    """Raise unless `train_fractions` has a number between 0 and 1 for each rank, and they add up to 1."""
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
    """Deals out a consecutive part of the data to each rank; every sample belongs to exactly one rank.

    Lightning leaves it alone because it is a `DistributedSampler`, and sets its epoch.
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

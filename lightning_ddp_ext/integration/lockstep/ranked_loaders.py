"""Loaders of a rank among others: samplers that deal out every sample, and lengths of all ranks."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_ddp_ext._compat.loaders import is_sampler_wrapper, wrapped_sampler
from lightning_ddp_ext.data.lockstep_loader import gather_lengths
from lightning_ddp_ext.data.own_generators import capture_states, find_generators, restore_states, seed_all
from lightning_ddp_ext.data.unpadded_sampler import UnpaddedDistributedSampler


class InjectedRank(int):
    """A rank as it is handed to the samplers that Lightning injects, so that these can be told from the user's.

    Args:
        rank: The rank.
        world_size: Number of ranks.
        value: What a sampler takes for the rank while it is constructed; by default the rank.
    """

    rank: int
    world_size: int

    def __new__(cls, rank: int, world_size: int = 1, value: int | None = None) -> "InjectedRank":  # noqa: D102
        created = super().__new__(cls, rank if value is None else value)
        created.rank, created.world_size = rank, world_size
        return created


class UnpaddedSamplerWrapper(UnpaddedDistributedSampler):
    """Deals out what a user's sampler draws, in its order. Lightning's own wrapper pads, and shuffles it in training.

    It draws from random numbers that are the same on every rank, from generators of its own too: those of ranks
    themselves part when one runs out of data.
    """

    @override
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        given = wrapped_sampler(self)
        if hasattr(given, "set_epoch"):
            given.set_epoch(epoch)

    @override
    def __iter__(self) -> Iterator[Any]:
        generators = find_generators([wrapped_sampler(self)])
        states = capture_states(generators)
        with isolate_rng():
            seed = (self.seed + self.epoch) % 2**32
            random.seed(seed)
            numpy.random.seed(seed)
            torch.manual_seed(seed)
            seed_all(generators, seed)
            cast(Any, self.dataset).reset()  # draws anew
        restore_states(generators, states)
        return (self.dataset[index] for index in self._indices())


def unpad(loader: object) -> None:
    """Make the sampler that Lightning has injected into a loader deal out every sample exactly once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
        is_wrapper = is_sampler_wrapper(sampler)
        # A class of the user's own may have been given the same arguments, `trainer.distributed_sampler_kwargs`.
        if not isinstance(sampler, DistributedSampler) or not (is_wrapper or type(sampler) is DistributedSampler):
            continue
        if isinstance(sampler.rank, InjectedRank):
            kind = UnpaddedSamplerWrapper if is_wrapper else UnpaddedDistributedSampler
            sampler.shuffle = sampler.shuffle and not is_wrapper
            kind.take_over(sampler, sampler.rank.rank, sampler.rank.world_size)


class RankedLoader:
    """A loader that knows how many batches every rank has of it. Its length is the largest of these.

    Everything else is the loader's, its class for `isinstance` too. Constructing it communicates.

    Args:
        loader: This rank's loader.
        group: The ranks; None if there is one.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup | None = None) -> None:
        def gather(own: int | None) -> list[int] | None:
            if group is None:
                return None if own is None else [own]
            return gather_lengths(own, group)

        self.__dict__.update(
            loader=loader,
            lengths=gather(sized_len(loader)),
            samples=gather(_count_samples(loader)),
            batch_sizes=gather(getattr(loader, "batch_size", None)),
        )

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__.get("loader", self))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        if self.lengths is None:
            raise TypeError("the number of batches is not known on every rank")
        return int(max(self.lengths))

    def __getattr__(self, name: str) -> Any:
        if "loader" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.__dict__["loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.loader, name, value)

    def samples_in(self, steps: Sequence[int]) -> list[int] | None:
        """Return how many samples each rank has in so many batches of its own, if that can be known."""
        if self.samples is None or self.batch_sizes is None:
            return None
        of_ranks = zip(self.samples, self.batch_sizes, steps, strict=True)
        return [min(samples, number * batch_size) for samples, batch_size, number in of_ranks]


def ranked(loader: Any) -> RankedLoader:
    """Return a loader as one that knows the lengths of all ranks. If it is not one yet, there is one rank."""
    return loader if type(loader) is RankedLoader else RankedLoader(loader)


def _count_samples(loader: object) -> int | None:
    return None if getattr(loader, "batch_size", None) is None else sized_len(getattr(loader, "sampler", None))

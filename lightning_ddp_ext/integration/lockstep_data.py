"""Lightning's loaders in lockstep: any number of them, in every mode of `CombinedLoader`."""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import is_sampler_wrapper
from lightning_ddp_ext.data.lockstep_loader import (
    LockstepLoader,
    Turn,
    UnevenInputs,
    gather_lengths,
    number_of_steps,
)
from lightning_ddp_ext.data.unpadded_sampler import UnpaddedDistributedSampler

_POSITION = "position"
_ENDLESS = float("inf")


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
    """Deals out what a user's sampler draws, as Lightning's own wrapper does with padding.

    It draws from random numbers that are the same on every rank: those of ranks themselves part when one runs out of
    data.
    """

    @override
    def __iter__(self) -> Iterator[Any]:
        with isolate_rng():
            seed = (self.seed + self.epoch) % 2**32
            random.seed(seed)
            numpy.random.seed(seed)
            torch.manual_seed(seed)
            cast(Any, self.dataset).reset()  # draws anew
        return (self.dataset[index] for index in self._indices())


def unpad(loader: object) -> None:
    """Make the sampler that Lightning has injected into a loader deal out every sample exactly once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and isinstance(sampler.rank, InjectedRank):
            kind = UnpaddedSamplerWrapper if is_sampler_wrapper(sampler) else UnpaddedDistributedSampler
            kind.take_over(sampler, sampler.rank.rank, sampler.rank.world_size)


class RankedLoader:
    """A loader that knows how many batches every rank has of it. Its length is the largest of these.

    Everything else is the loader's. Constructing it communicates once.

    Args:
        loader: This rank's loader.
        group: The ranks.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup) -> None:
        self.__dict__.update(
            loader=loader,
            lengths=gather_lengths(sized_len(loader), group),
            samples=gather_lengths(_count_samples(loader), group),
            batch_sizes=gather_lengths(getattr(loader, "batch_size", None), group),
        )

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

    def samples_after(self, steps: int) -> int | None:
        """Return how many samples the ranks have after so many batches, if that can be known."""
        if self.samples is None or self.batch_sizes is None:
            return None
        left = (
            max(0, samples - steps * batch_size)
            for samples, batch_size in zip(self.samples, self.batch_sizes, strict=True)
        )
        return int(sum(left))


class LockstepCombinedLoader(CombinedLoader):
    """Combines loaders as a `CombinedLoader` does on each rank, and makes the same number of steps on every rank.

    A rank has run out of data when its own combination of loaders would end. One after another ("sequential"), ranks
    are in the same loader at any time. The state is the number of steps, so it fits every rank.

    Args:
        iterables: Loaders, of which `flattened` is to be set to `RankedLoader`.
        mode: See `CombinedLoader`.
        group: The ranks, over a back-end that has CPU tensors.
        uneven_inputs: See `number_of_steps`.

    Attributes:
        turns: Which ranks have data, for each batch that was fetched and not yet taken.
    """

    def __init__(self, iterables: Any, mode: Any, group: dist.ProcessGroup, uneven_inputs: UnevenInputs) -> None:
        super().__init__(iterables, mode)
        self.turns: deque[Turn] = deque()
        self._group = group
        self._uneven_inputs = uneven_inputs
        self._skip = 0
        self._position = 0
        self._has_ended = False
        self._said: set[int] = set()
        self._steps: Iterator[tuple[Any, Turn, int, int]] = iter(())

    @override
    def __iter__(self) -> "LockstepCombinedLoader":
        self.turns.clear()
        self._has_ended = False
        self._position, self._skip = self._skip, 0
        self._steps = self._one_after_another() if self._mode == "sequential" else self._together(self._position)
        return self

    @override
    def __next__(self) -> tuple[Any, int, int]:
        try:
            batch, turn, batch_idx, dataloader_idx = next(self._steps)
        except StopIteration:
            self._has_ended = True
            raise
        self.turns.append(turn)
        self._position += 1
        return batch, batch_idx, dataloader_idx

    @override
    def __len__(self) -> int:
        steps = sum(number_of_steps(lengths, self._uneven_inputs) for lengths in self._lengths_of_ranks())
        if steps == _ENDLESS:
            raise TypeError("the number of batches is not known on every rank")
        return int(steps)

    @override
    def reset(self) -> None:
        super().reset()
        self._steps = iter(())
        self.turns.clear()

    def _together(self, skip: int) -> Iterator[tuple[Any, Turn, int, int]]:
        combined = CombinedLoader(self.iterables, self._mode)
        combined.limits = self.limits
        known = all(loader.lengths is not None for loader in self.flattened)
        lengths = [int(length) for length in self._lengths_of_ranks()[0]] if known else None
        limit = combine_lengths(self._mode, self.limits or [_ENDLESS])
        yield from self._make_steps(_Batches(combined), lengths, limit, 0, skip)

    def _one_after_another(self) -> Iterator[tuple[Any, Turn, int, int]]:
        limits = self.limits or [_ENDLESS] * len(self.flattened)
        for dataloader_idx, (loader, limit) in enumerate(zip(self.flattened, limits, strict=True)):
            yield from self._make_steps(loader, loader.lengths, limit, dataloader_idx)

    def _make_steps(
        self, source: Iterable[Any], lengths: list[int] | None, limit: float, dataloader_idx: int, skip: int = 0
    ) -> Iterator[tuple[Any, Turn, int, int]]:
        steps = LockstepLoader(source, lengths, self._group, self._uneven_inputs, limit, skip)
        for number, (batch, turn) in enumerate(steps, skip):
            self._say_what_is_left_out(steps, dataloader_idx)
            yield batch, turn, number, dataloader_idx
        self._say_what_is_left_out(steps, dataloader_idx)

    def _lengths_of_ranks(self) -> list[list[float]]:
        """Return the number of batches of each rank, for each loader or for all together; infinite if not known."""
        limits = self.limits or [_ENDLESS] * len(self.flattened)
        world_size = dist.get_world_size(self._group)
        lengths = [
            [min(length, limit) for length in loader.lengths or [_ENDLESS] * world_size]
            for loader, limit in zip(self.flattened, limits, strict=True)
        ]
        if self._mode == "sequential":
            return lengths
        return [[combine_lengths(self._mode, of_rank) for of_rank in zip(*lengths, strict=True)]]

    def _say_what_is_left_out(self, steps: LockstepLoader, dataloader_idx: int) -> None:
        if dataloader_idx in self._said or not any(steps.left_out):
            return
        self._said.add(dataloader_idx)
        samples = self.flattened[dataloader_idx].samples_after(steps.length) if len(self.flattened) == 1 else None
        batches = f"batches {', '.join(map(str, steps.left_out))} of ranks 0 to {len(steps.left_out) - 1}"
        at_least = "" if steps.length is not None else "at least "
        rank_zero_info(
            f'`uneven_inputs="stop"` leaves out {at_least}{batches}'
            + (f", {samples} samples in all, in every epoch." if samples is not None else ".")
        )

    def _state_dicts(self) -> list[dict[str, Any]]:
        taken = self._position - len(self.turns)
        has_ended = self._has_ended and not self.turns
        length = sized_len(self)
        return [{_POSITION: 0 if has_ended or (length is not None and taken >= length) else taken}]

    def _load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        self._skip = next((state[_POSITION] for state in states if _POSITION in state), 0)


def combine_lengths(mode: str, lengths: Sequence[float]) -> float:
    """Return how many batches a `CombinedLoader` yields, from the numbers of its loaders."""
    if mode == "max_size_cycle" and not min(lengths):
        return 0  # nothing to begin the cycle again with
    return min(lengths) if mode == "min_size" else max(lengths)


class _Batches:
    """What a `CombinedLoader` yields, without indices."""

    def __init__(self, combined: CombinedLoader) -> None:
        self._combined = combined

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _, _ in self._combined)


def _count_samples(loader: object) -> int | None:
    return None if getattr(loader, "batch_size", None) is None else sized_len(getattr(loader, "sampler", None))

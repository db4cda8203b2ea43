"""Lightning's loaders in lockstep."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_ddp_ext._compat.loaders import is_sampler_wrapper, wrapped_sampler
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.join.lockstep_loader import (
    HasNextBatch,
    LockstepLoader,
    StepParticipation,
    UnevenInputs,
    gather_lengths,
    number_of_steps,
)
from lightning_ddp_ext.join.samplers import UnpaddedDistributedSampler
from lightning_ddp_ext.ranks.sample_counts import CountedCombinedLoader
from lightning_ddp_ext.resume.resumable_loader import POSITION, WORLD_SIZE, position_in
from lightning_ddp_ext.resume.resumable_rng import ResumableRng
from lightning_ddp_ext.resume.rng_state import capture_states, find_loader_rngs, restore_states, seed_all


class LightningInjectedRank(int):
    """A rank as it is handed to the samplers that Lightning injects, so that these can be told from the user's.

    Args:
        rank: The rank.
        world_size: Number of ranks.
        value: What a sampler takes for the rank while it is constructed; by default the rank.
    """

    rank: int
    world_size: int

    def __new__(cls, rank: int, world_size: int = 1, value: int | None = None) -> "LightningInjectedRank":  # noqa: D102
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
        generators = find_loader_rngs([wrapped_sampler(self)])
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


def disable_sampler_padding(loader: object) -> None:
    """Make the sampler that Lightning has injected into a loader deal out every sample exactly once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
        is_wrapper = is_sampler_wrapper(sampler)
        # A class of the user's own may have been given the same arguments, `trainer.distributed_sampler_kwargs`.
        if not isinstance(sampler, DistributedSampler) or not (is_wrapper or type(sampler) is DistributedSampler):
            continue
        if isinstance(sampler.rank, LightningInjectedRank):
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


ENDLESS = float("inf")


class LockstepCombinedLoader(CountedCombinedLoader):
    """Combines loaders as a `CombinedLoader` does on each rank, and makes the same number of steps on every rank.

    A rank has run out of data when its own combination of loaders would end. One after another ("sequential"), ranks
    are in the same loader at any time.

    Args:
        iterables: Loaders; several ranks set `flattened` to a `RankedLoader` of each.
        mode: See `CombinedLoader`.
        group: The ranks, over a backend that has CPU tensors.
        uneven_inputs: See `number_of_steps`.
        has_next_batch: How ranks vote on whether there is another step.

    Attributes:
        participations: Which ranks have data, for each batch that was fetched and not yet taken.
    """

    def __init__(
        self,
        iterables: Any,
        mode: Any,
        group: dist.ProcessGroup,
        uneven_inputs: UnevenInputs,
        has_next_batch: HasNextBatch,
    ) -> None:
        super().__init__(iterables, mode)
        self.participations: deque[StepParticipation] = deque()
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._uneven_inputs = uneven_inputs
        self._has_next_batch = has_next_batch
        self._said: set[int] = set()
        self._steps: Iterator[tuple[Any, StepParticipation, float | None, int, int]] = iter(())

    @override
    def __iter__(self) -> "LockstepCombinedLoader":
        self.participations.clear()
        self.samples.clear()
        self._steps = self._one_after_another() if self._mode == "sequential" else self._together(0)
        return self

    @override
    def __next__(self) -> tuple[Any, int, int]:
        batch, participation, samples, batch_idx, dataloader_idx = next(self._steps)
        self.participations.append(participation)
        self.samples.append(samples)
        return batch, batch_idx, dataloader_idx

    @override
    def __len__(self) -> int:
        steps = sum(number_of_steps(lengths, self._uneven_inputs) for lengths in self._lengths_of_ranks())
        if steps == ENDLESS:
            raise TypeError("the number of batches is not known on every rank")
        return int(steps)

    @override
    def reset(self) -> None:
        super().reset()
        self._steps = iter(())
        self.participations.clear()

    def close(self) -> None:
        """Let go of the process group; Lightning keeps loaders."""
        self.reset()
        del self._group, self._has_next_batch

    @property
    def _ranked(self) -> list[RankedLoader]:
        return [ranked(loader) for loader in self.flattened]

    def _together(self, skip: int) -> Iterator[tuple[Any, StepParticipation, float | None, int, int]]:
        combined = CountedCombinedLoader(self.iterables, self._mode)
        combined.flattened = [loader.loader for loader in self._ranked]
        combined.limits = self.limits
        known = all(loader.lengths is not None for loader in self._ranked)
        lengths = [int(length) for length in self._lengths_of_ranks()[0]] if known else None
        limit = combine_lengths(self._mode, self.limits or [ENDLESS])
        # A rank that has run out of data passes over no more than it has.
        own = skip if lengths is None else min(skip, lengths[self._rank])
        batches = self._fetched(combined, own, looks_ahead=not known)
        yield from self._make_steps(batches, combined, lengths, limit, 0, skip)

    def _fetched(self, combined: CombinedLoader, skip: int, looks_ahead: bool) -> Iterable[tuple[Any, int, int]]:
        """Return what is iterated over once to fetch the batches of this rank."""
        return combined

    def _one_after_another(self) -> Iterator[tuple[Any, StepParticipation, float | None, int, int]]:
        limits = self.limits or [ENDLESS] * len(self.flattened)
        for dataloader_idx, (loader, limit) in enumerate(zip(self._ranked, limits, strict=True)):
            counted = CountedCombinedLoader([loader.loader], "sequential")
            yield from self._make_steps(counted, counted, loader.lengths, limit, dataloader_idx)

    def _make_steps(
        self,
        fetched: Iterable[tuple[Any, int, int]],
        counted: CountedCombinedLoader,
        lengths: list[int] | None,
        limit: float,
        dataloader_idx: int,
        skip: int = 0,
    ) -> Iterator[tuple[Any, StepParticipation, float | None, int, int]]:
        steps = LockstepLoader(
            _Batches(fetched),
            lengths,
            self._group,
            self._uneven_inputs,
            limit,
            skip,
            self._has_next_batch,
            count=lambda: counted.samples[-1] if counted.samples else None,
        )
        for number, (batch, participation) in enumerate(steps, skip):
            self._say_what_is_left_out(steps, dataloader_idx)
            yield batch, participation, steps.samples, number, dataloader_idx
        self._say_what_is_left_out(steps, dataloader_idx)

    def _lengths_of_ranks(self) -> list[list[float]]:
        """Return the number of batches of each rank, for each loader or for all together; infinite if not known."""
        limits = self.limits or [ENDLESS] * len(self.flattened)
        lengths = [
            [min(length, limit) for length in loader.lengths or [ENDLESS] * self._world_size]
            for loader, limit in zip(self._ranked, limits, strict=True)
        ]
        if self._mode == "sequential":
            return lengths
        return [[combine_lengths(self._mode, of_rank) for of_rank in zip(*lengths, strict=True)]]

    def _say_what_is_left_out(self, steps: LockstepLoader, dataloader_idx: int) -> None:
        if dataloader_idx in self._said or not any(steps.left_out):
            return
        self._said.add(dataloader_idx)
        batches = f"batches {', '.join(map(str, steps.left_out))} of ranks 0 to {len(steps.left_out) - 1}"
        samples = self._count_samples_left_out(steps)
        counted = "" if samples is None else f", {samples} sample{'s' if samples > 1 else ''}"
        at_least, each = (
            ("at least ", "") if steps.length is None else ("", " in all, in every epoch" if counted else "")
        )
        rank_zero_info(f'`uneven_inputs="stop"` leaves out {at_least}{batches}{counted}{each}.')

    def _count_samples_left_out(self, steps: LockstepLoader) -> int | None:
        if len(self.flattened) > 1:
            return None
        if steps.length is None:
            return steps.left_out_samples
        loader = self._ranked[0]
        kept, given = (
            loader.samples_in([steps.length + more * number for number in steps.left_out]) for more in (0, 1)
        )
        return None if kept is None or given is None else sum(given) - sum(kept)


def combine_lengths(mode: str, lengths: Sequence[float]) -> float:
    """Return how many batches a `CombinedLoader` yields, from the numbers of its loaders."""
    if mode == "max_size_cycle" and not min(lengths):
        return 0  # nothing to begin the cycle again with
    return min(lengths) if mode == "min_size" else max(lengths)


class _Batches:
    """Batches without indices."""

    def __init__(self, fetched: Iterable[tuple[Any, int, int]]) -> None:
        self._fetched = fetched

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _, _ in self._fetched)


_DEALT = "dealt"
_BEFORE = "before"
_TAKEN = "taken"
_SEED = "seed"


class ResumableLockstepLoader(LockstepCombinedLoader):
    """A `LockstepCombinedLoader` that begins where an interrupted run has ended.

    Its state is the number of steps, which fits every rank. On as many ranks as before, each passes over the batches it
    has used. On another number, the samples that nobody has used are dealt out anew, which needs to know which they
    are: there is one loader, whose sampler is an `UnpaddedDistributedSampler`.

    Args:
        iterables: See `LockstepCombinedLoader`.
        mode: See `LockstepCombinedLoader`.
        group: See `LockstepCombinedLoader`.
        uneven_inputs: See `LockstepCombinedLoader`.
        has_next_batch: See `LockstepCombinedLoader`.
        rng: Knows the RNG state of this process.
        reload_after_epoch: Called if this epoch has another length than the next one, with what to do between them.
    """

    def __init__(
        self,
        iterables: Any,
        mode: Any,
        group: dist.ProcessGroup,
        uneven_inputs: UnevenInputs,
        has_next_batch: HasNextBatch,
        rng: ResumableRng,
        reload_after_epoch: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__(iterables, mode, group, uneven_inputs, has_next_batch)
        self._rng = rng
        self._reload_after_epoch = reload_after_epoch
        self._dealt: list[list[int]] = []  # samples of each rank, for each part of the epoch before this one
        self._before = 0  # steps in these parts
        self._skip = self._position = 0
        self._has_ended = True

    @override
    def __iter__(self) -> "ResumableLockstepLoader":
        super().__iter__()
        skip, self._skip = self._skip, 0
        self._position, self._has_ended = self._before + skip, False
        self._steps = self._together(skip)
        return self

    @override
    def __next__(self) -> tuple[Any, int, int]:
        try:
            fetched = super().__next__()
        except StopIteration:
            self._has_ended = True
            raise
        self._position += 1
        return fetched

    @override
    def __len__(self) -> int:
        return self._before + super().__len__()

    @property
    def used(self) -> int | None:
        """How many batches of this epoch this rank has used since it resumed; None between epochs."""
        steps = self._steps_made
        has_fetched = self._position > self._before
        return steps - self._before if steps is not None and has_fetched else None

    @property
    def _steps_made(self) -> int | None:
        steps = self._position - len(self.participations)
        has_ended = self._has_ended and not self.participations
        length = sized_len(self)
        return None if has_ended or (length is not None and steps >= length) else steps

    @override
    def _fetched(self, combined: CombinedLoader, skip: int, looks_ahead: bool) -> Iterable[tuple[Any, int, int]]:
        return self._rng.iterate(combined, self.flattened, skip, looks_ahead)

    def _state_dicts(self) -> list[dict[str, Any]]:
        steps = self._steps_made
        state: dict[str, Any] = {POSITION: steps or 0, WORLD_SIZE: self._world_size}
        if steps:
            taken = self._taken(steps - self._before)
            seed = getattr(self.flattened[0].sampler, "seed", None) if taken else None
            state.update({_BEFORE: self._before, _DEALT: self._dealt, _TAKEN: taken, _SEED: seed})
        return [state]

    def _load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        state: dict[str, Any] = next((state for state in states if POSITION in state), {})
        position = position_in(states)
        if not position:
            return
        # A checkpoint of `ddp_checkpoint` has no more than the position.
        ranks, dealt, before = state[WORLD_SIZE], state.get(_DEALT, []), state.get(_BEFORE, 0)
        if ranks != self._world_size:
            taken = state.get(_TAKEN)
            if taken is None:
                self._refuse(ranks)
            dealt, before = [*dealt, taken], position
        if dealt:
            self._deal_rest(dealt, before, ranks, state.get(_SEED))
        self._skip = position - before

    def _taken(self, steps: int) -> list[int] | None:
        """Return how many samples the ranks have taken in so many steps, if that can be known."""
        loader = self._ranked[0]
        return loader.samples_in([steps] * self._world_size) if len(self.flattened) == 1 else None

    def _deal_rest(self, dealt: list[list[int]], before: int, ranks: int, seed: int | None) -> None:
        """Deal out what is left of the epoch. Communicates."""
        loader = self._ranked[0]
        sampler = getattr(loader, "sampler", None)
        if len(self.flattened) > 1 or not isinstance(sampler, UnpaddedDistributedSampler) or loader.lengths is None:
            self._refuse(ranks)
        assert isinstance(sampler, UnpaddedDistributedSampler)
        limit = ENDLESS if self.limits is None or self.limits[0] >= len(loader) else self.limits[0] - before
        sampler.seed = sampler.seed if seed is None else seed  # what has been dealt depends on it
        sampler.leave_out(dealt)
        self.flattened = [RankedLoader(loader.loader, self._group)]  # with other lengths
        self.limits = [max(0, limit)]
        self._dealt, self._before = dealt, before
        self._reload_after_epoch(partial(sampler.leave_out, ()))

    def _refuse(self, ranks: int) -> None:
        raise UnsupportedFeatureError(
            f"the checkpoint was saved by {ranks} ranks in the middle of an epoch, and"
            f" {self._world_size} resume it. What is left can be dealt out anew only for a single"
            " loader with a dataset that has a length and the sampler of `ddp_join`; streams, several loaders and"
            " samplers or batch samplers of your own, and checkpoints of other strategies, need the same number of"
            f" ranks. Resume on {ranks} ranks, or from a checkpoint of the end of an epoch."
        )

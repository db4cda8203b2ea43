"""Lightning's combined loaders with the same number of steps on every rank."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loaders import combination_mode, has_exact_length
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext.distributed.exchange import gather_known
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.join.lockstep_loader import HasNextBatch, LockstepLoader, UnevenInputs, number_of_steps
from lightning_ddp_ext.ranks.loaders import CountedCombinedLoader, FetchedBatch
from lightning_ddp_ext.resume.resumable_loader import POSITION, WORLD_SIZE, ResumableRng, state_with_position

_UNLIMITED = float("inf")


class RankedLoader:
    """A loader, also for `isinstance`, whose length is the largest number of batches of any rank.

    Its constructor communicates, unless there is a single rank and thus no group. `lengths` and `samples` have a number
    for each rank, or are None if any rank does not know its number.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup | None = None) -> None:
        self.__dict__.update(loader=loader)
        self.exchange(group)

    def exchange(self, group: dist.ProcessGroup | None) -> None:
        """Exchange the lengths of all ranks once more, because a dataset may grow or shrink. Communicates as above."""
        loader = self.loader
        batch_size = getattr(loader, "batch_size", None)
        known = (
            sized_len(loader),
            None if batch_size is None else sized_len(getattr(loader, "sampler", None)),
            batch_size,
            1 if has_exact_length(loader) else None,
        )
        alone = [None if number is None else [number] for number in known]
        lengths, samples, batch_sizes, exact = alone if group is None else gather_known(known, group)
        is_exact = lengths is not None and exact is not None
        self.__dict__.update(lengths=lengths, samples=samples, batch_sizes=batch_sizes, is_exact=is_exact)

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

    def __delattr__(self, name: str) -> None:
        delattr(self.loader, name)


class SteppedCombinedLoader(CountedCombinedLoader, ABC):
    """A `CombinedLoader` that makes the same number of steps on every rank, and resumes in the middle of an epoch.

    Its state is the number of steps. Evaluation, which has no `rng`, does not resume.
    """

    def __init__(self, iterables: Any, mode: Any, group: dist.ProcessGroup, rng: ResumableRng | None) -> None:
        super().__init__(iterables, mode)
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._rng = rng
        self._steps: Iterator[tuple[tuple[Any, FetchedBatch], int, int]] = iter(())
        self._skip = self._position = 0
        self._has_ended = True

    @override
    def __iter__(self) -> "SteppedCombinedLoader":
        self.stop_prefetching()
        self.fetched.clear()
        skip, self._skip = self._skip, 0
        self._position, self._has_ended = skip, False
        self._steps = self._make_steps(skip)
        return self

    @override
    def __next__(self) -> tuple[Any, int, int]:
        try:
            (batch, fetched), batch_idx, dataloader_idx = next(self._steps)
        except StopIteration:
            self._has_ended = True
            raise
        self._position += 1
        self.fetched.append(
            fetched if self._rng is not None else fetched._replace(position=(batch_idx, dataloader_idx))
        )
        return batch, batch_idx, dataloader_idx

    @override
    def __len__(self) -> int:
        steps = sum(self._numbers_of_steps())
        if steps == _UNLIMITED:
            raise TypeError("the number of batches is not known on every rank")
        return int(steps)

    @abstractmethod
    def _numbers_of_steps(self) -> list[float]:
        """Return the number of steps: for each loader in mode "sequential", else for all; infinity if unknown."""

    @override
    def reset(self) -> None:
        super().reset()
        self._steps = iter(())

    def close(self) -> None:
        """Drop the process group, because Lightning keeps a reference to the loader."""
        self.reset()
        self.prefetcher = None
        del self._group

    @abstractmethod
    def _make_steps(self, skip: int) -> Iterator[tuple[tuple[Any, FetchedBatch], int, int]]:
        """Yield steps with the indices of batch and loader, after as many steps as an interrupted run has made."""

    def _combine(self, loaders: list[Any]) -> CountedCombinedLoader:
        """Combine loaders that contribute to the same steps: one in mode "sequential", all in other modes."""
        combined = CountedCombinedLoader(
            loaders if combination_mode(self) == "sequential" else self.iterables, combination_mode(self)
        )
        combined.flattened = loaders
        combined.prefetcher = self.prefetcher
        return combined

    def _fetch(
        self, combined: CountedCombinedLoader, skip: int, limit: int | None, looks_ahead: bool
    ) -> Iterator[tuple[Any, float | None]]:
        """Yield the batches of this rank with their numbers of samples."""
        fetched: Iterable[tuple[Any, int, int]] = combined
        combined.fetch_limit = limit
        if self._rng is not None:
            fetched = self._rng.iterate(combined, self.flattened, skip, looks_ahead)
        for batch, _, _ in islice(fetched, limit):
            yield batch, combined.fetched.pop().samples

    @property
    def used(self) -> int | None:
        """Number of steps made in this epoch, including those before it was resumed; None between epochs."""
        steps = self._position - len(self.fetched)
        has_ended = self._has_ended and not self.fetched
        length = sized_len(self)
        is_between = not self._position or has_ended or (length is not None and steps >= length)
        return None if is_between else steps


class LockstepCombinedLoader(SteppedCombinedLoader):
    """A `CombinedLoader` in which each rank draws its own batches.

    A rank runs out of data when its own `CombinedLoader` would end. In mode "sequential" all ranks use the same loader
    at any time.

    Each rank of a resumed run skips the batches it has used, so an epoch is resumed on as many ranks as before.
    """

    def __init__(
        self,
        iterables: Any,
        mode: Any,
        group: dist.ProcessGroup,
        uneven_inputs: UnevenInputs,
        has_next_batch: HasNextBatch,
        rng: ResumableRng | None,
    ) -> None:
        super().__init__(iterables, mode, group, rng)
        self._uneven_inputs = uneven_inputs
        self._has_next_batch = has_next_batch
        self._has_reported = False

    def _numbers_of_steps(self) -> list[float]:
        return [number_of_steps(lengths, self._uneven_inputs) for lengths in self._lengths_of_ranks()]

    @override
    def close(self) -> None:
        super().close()
        del self._has_next_batch

    @override
    def __iter__(self) -> "LockstepCombinedLoader":
        self._exchange_lengths()  # here, since Lightning asks for the length next
        super().__iter__()
        return self

    def _exchange_lengths(self) -> None:
        for loader in self.flattened:
            if type(loader) is RankedLoader:
                loader.exchange(self._group)

    @override
    def _make_steps(self, skip: int) -> Iterator[tuple[tuple[Any, FetchedBatch], int, int]]:
        self._exchange_lengths()  # hooks at the start of the epoch may have changed a dataset
        ranked = self._ranked
        parts = [[loader] for loader in ranked] if combination_mode(self) == "sequential" else [ranked]
        for dataloader_idx, (part, numbers) in enumerate(zip(parts, self._lengths_of_ranks(), strict=True)):
            combined = self._combine([loader.loader for loader in part])
            lengths = None if any(loader.lengths is None for loader in part) else [int(number) for number in numbers]
            is_exact = all(loader.is_exact for loader in part)
            limit = None if numbers[self._rank] == _UNLIMITED else int(numbers[self._rank])
            # A rank skips no more batches than it has.
            own_skip = min(skip, limit or 0) if is_exact else skip
            lockstep = LockstepLoader(
                self._fetch(combined, own_skip, limit, looks_ahead=not is_exact),
                lengths,
                self._group,
                self._has_next_batch,
                self._uneven_inputs,
                skip,
                is_exact,
            )
            self._report_dropped(lockstep)
            for batch_idx, step in enumerate(lockstep, skip):
                yield step, batch_idx, dataloader_idx
            self._report_dropped(lockstep)

    @property
    def _ranked(self) -> list[RankedLoader]:
        # A single rank keeps the user's loaders, so that `trainer.train_dataloader` returns them.
        return [one if type(one) is RankedLoader else RankedLoader(one) for one in self.flattened]

    def _lengths_of_ranks(self) -> list[list[float]]:
        """Return the number of batches of each rank: for each loader in mode "sequential", else for all together."""
        lengths = [
            [min(length, limit) for length in loader.lengths or [_UNLIMITED] * self._world_size]
            for loader, limit in zip(self._ranked, self.limits or repeat(_UNLIMITED), strict=False)
        ]
        if combination_mode(self) == "sequential":
            return lengths
        return [[combined_length(combination_mode(self), of_rank) for of_rank in zip(*lengths, strict=True)]]

    def _samples_in(self, batches: Sequence[int]) -> list[int] | None:
        """Return the number of samples in the first batches of each rank; None for several loaders, or if unknown."""
        loader = self._ranked[0]
        if len(self.flattened) > 1 or loader.samples is None or loader.batch_sizes is None:
            return None
        of_ranks = zip(loader.samples, loader.batch_sizes, batches, strict=True)
        return [min(samples, number * batch_size) for samples, batch_size, number in of_ranks]

    def _report_dropped(self, lockstep: LockstepLoader) -> None:
        dropped, steps = lockstep.dropped, lockstep.steps
        if self._has_reported or not any(dropped):
            return
        self._has_reported = True
        counts = {f"rank {rank}": number for rank, number in enumerate(dropped) if number}
        parts = [f"{number} batch{'es' if number > 1 else ''} of {rank}" for rank, number in counts.items()]
        if steps is None:  # other ranks may have more than one batch when a rank reaches the end of its stream
            rank_zero_info(f'`uneven_inputs="stop"` drops at least {", ".join(parts)}.')
            return
        kept, given = self._samples_in([steps] * self._world_size), self._samples_in([steps + one for one in dropped])
        if kept is not None and given is not None:
            samples = sum(given) - sum(kept)
            parts.append(f"{samples} sample{'s' if samples > 1 else ''}")
        rank_zero_info(f'`uneven_inputs="stop"` drops {", ".join(parts)} in every epoch.')

    def _state_dicts(self) -> list[dict[str, Any]]:
        return [{POSITION: self.used or 0, WORLD_SIZE: self._world_size}]

    def _load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        state = state_with_position(states)
        self._skip, ranks = state.get(POSITION, 0), state.get(WORLD_SIZE, self._world_size)
        if self._skip and ranks != self._world_size:
            raise UnsupportedFeatureError(
                f"the checkpoint was saved by {ranks} ranks in the middle of an epoch, and {self._world_size} resume"
                f" it, but each rank skips the batches that it has used itself. Resume on {ranks} ranks, or from a"
                " checkpoint of the end of an epoch; `balanced_ddp` continues an epoch on any number of ranks."
            )


def combined_length(mode: str, lengths: Sequence[float]) -> float:
    """Return the number of batches of a `CombinedLoader`, given the numbers of its loaders."""
    if mode == "max_size_cycle" and not min(lengths):
        return 0  # nothing to begin the cycle again with
    return min(lengths) if mode == "min_size" else max(lengths)

"""Lightning's loaders in lockstep: any number of them, in every mode of `CombinedLoader`."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from typing_extensions import override

from lightning_ddp_ext.data.lockstep_loader import LockstepLoader, Turn, UnevenInputs, Votes, number_of_steps
from lightning_ddp_ext.integration.lockstep.ranked_loaders import RankedLoader, ranked
from lightning_ddp_ext.integration.ranks.counted_loaders import CountedCombinedLoader

ENDLESS = float("inf")


class LockstepCombinedLoader(CountedCombinedLoader):
    """Combines loaders as a `CombinedLoader` does on each rank, and makes the same number of steps on every rank.

    A rank has run out of data when its own combination of loaders would end. One after another ("sequential"), ranks
    are in the same loader at any time.

    Args:
        iterables: Loaders; several ranks set `flattened` to a `RankedLoader` of each.
        mode: See `CombinedLoader`.
        group: The ranks, over a back-end that has CPU tensors.
        uneven_inputs: See `number_of_steps`.
        votes: How ranks vote on whether there is another step.

    Attributes:
        turns: Which ranks have data, for each batch that was fetched and not yet taken.
    """

    def __init__(
        self, iterables: Any, mode: Any, group: dist.ProcessGroup, uneven_inputs: UnevenInputs, votes: Votes
    ) -> None:
        super().__init__(iterables, mode)
        self.turns: deque[Turn] = deque()
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._uneven_inputs = uneven_inputs
        self._votes = votes
        self._said: set[int] = set()
        self._steps: Iterator[tuple[Any, Turn, float | None, int, int]] = iter(())

    @override
    def __iter__(self) -> "LockstepCombinedLoader":
        self.turns.clear()
        self.samples.clear()
        self._steps = self._one_after_another() if self._mode == "sequential" else self._together(0)
        return self

    @override
    def __next__(self) -> tuple[Any, int, int]:
        batch, turn, samples, batch_idx, dataloader_idx = next(self._steps)
        self.turns.append(turn)
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
        self.turns.clear()

    def close(self) -> None:
        """Let go of the process group; Lightning keeps loaders."""
        self.reset()
        del self._group, self._votes

    @property
    def _ranked(self) -> list[RankedLoader]:
        return [ranked(loader) for loader in self.flattened]

    def _together(self, skip: int) -> Iterator[tuple[Any, Turn, float | None, int, int]]:
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

    def _one_after_another(self) -> Iterator[tuple[Any, Turn, float | None, int, int]]:
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
    ) -> Iterator[tuple[Any, Turn, float | None, int, int]]:
        steps = LockstepLoader(
            _Batches(fetched),
            lengths,
            self._group,
            self._uneven_inputs,
            limit,
            skip,
            self._votes,
            count=lambda: counted.samples[-1] if counted.samples else None,
        )
        for number, (batch, turn) in enumerate(steps, skip):
            self._say_what_is_left_out(steps, dataloader_idx)
            yield batch, turn, steps.samples, number, dataloader_idx
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

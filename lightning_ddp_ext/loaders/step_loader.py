"""The loaders of one loop: a source makes their steps, whose position in the epoch is counted here."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loaders import combination_mode, shut_down_workers
from lightning_ddp_ext._lightning import CombinedLoader, rank_zero_warn, sized_len
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.loaders.counting import CountedBatches
from lightning_ddp_ext.resume.rng_state import LOOKAHEAD, ResumableRng

POSITION, WORLD_SIZE = "position", "world_size"  # in checkpoints
UNLIMITED = float("inf")


@dataclass(frozen=True, slots=True)
class Participation:
    """The ranks that have a batch in a step."""

    active: tuple[int, ...]  # in ascending order
    is_shadow: bool  # this rank has no batch
    is_uneven: bool  # some rank has no batch


class FetchedBatch(NamedTuple):
    """The samples of a batch, and the ranks that have a batch in its step."""

    samples: float | None  # None if they cannot be counted
    participation: Participation | None = None  # None if every rank has a batch
    shares: Any = None  # the `SharedBatch` of `shares/share_table.py`, if ranks share the batch
    position: tuple[int, int] = (0, 0)  # index of the batch and of its loader
    is_stand_in: bool = False  # hooks see a copy of this batch in this or later shadow steps
    has_next_batch: Any = None  # the `HasNextBatch` of the loop, if ranks compare batches one step ahead


Steps = Iterator[tuple[tuple[Any, int, int], FetchedBatch]]
"""Batches with their index and the index of their loader, as from a `CombinedLoader`, and a record of each."""


class StepSource:
    """Makes the steps of a `StepLoader` from its loaders."""

    begins_at_once = False  # whether the call of `steps` begins to iterate over the loaders, not its first item
    world_size = 1

    def numbers_of_steps(self, loader: "StepLoader") -> list[float]:
        """Return the number of steps: for each loader in mode "sequential", else for all; infinity if unknown."""
        return combined_lengths(loader, [sized_len(one) for one in loader.flattened])

    def steps(self, loader: "StepLoader", skip: int) -> Steps:
        """Begin an epoch, and return its steps after as many as an interrupted run has made."""
        raise NotImplementedError

    def prepare(self, loader: "StepLoader") -> None:
        """Prepare loaders before their first iteration, if Lightning's loops do not. May communicate."""

    def check_ranks(self, ranks: int) -> None:
        """Check the number of ranks that have saved a position in the middle of an epoch."""

    def reset(self, loader: "StepLoader") -> None:
        """End the workers of loaders."""
        for one in loader.flattened:
            shut_down_workers(one)

    def state_dict(self, loader: "StepLoader", is_within_epoch: bool) -> dict[str, Any]:
        """Return the state beside the position."""
        return {}

    def load_state_dict(self, loader: "StepLoader", state: Mapping[str, Any], has_rng: bool) -> None:
        """Restore a state; `has_rng` is False if another number of ranks has saved it."""


class StepLoader(CombinedLoader):
    """The loaders of a loop, whose steps a source makes; an epoch can be resumed.

    `fetched` has a record of each step that has been fetched and has not begun. The state is the number of steps that
    have begun. Without an `rng`, as in evaluation, it does not resume.
    """

    def __init__(
        self,
        iterables: Any,
        mode: Any,
        source: StepSource,
        rng: ResumableRng | None = None,
        prefetcher: Any = None,
        looks_ahead: bool = True,
    ) -> None:
        super().__init__(iterables, mode)
        self.source = source
        self.rng = rng
        self.prefetcher = prefetcher  # the `Prefetcher` that fetches batches before they are needed
        # False if `training_step` fetches its batches itself. Otherwise a loop without a length is one batch ahead.
        self.looks_ahead = looks_ahead
        self.skip = 0  # steps of the next epoch that an interrupted run has made
        self._steps: Steps = iter(())
        self._position = 0  # steps of this epoch that have been fetched
        self.length: int | None = None  # steps of this epoch; None if unknown
        self._has_ended = True
        self._forget_fetched()

    def _forget_fetched(self) -> None:
        self.fetched: deque[FetchedBatch] = deque(maxlen=LOOKAHEAD if self.looks_ahead else 0)

    @override
    def __iter__(self) -> "StepLoader":
        self._stop()
        self._position, self.skip = self.skip, 0
        self._has_ended = False
        self._steps = self.source.steps(self, self._position)
        self.length = sized_len(self)
        return self

    @override
    def __next__(self) -> tuple[Any, int, int]:
        try:
            step, fetched = next(self._steps)
        except StopIteration:
            self._has_ended = True
            raise
        self._position += 1
        self.fetched.append(fetched._replace(position=step[1:]))
        return step

    @override
    def __len__(self) -> int:
        steps = sum(self.source.numbers_of_steps(self))
        if steps == UNLIMITED:
            raise TypeError("the number of batches is not known on every rank")
        return int(steps)

    @property
    def begun(self) -> int | None:
        """Number of steps of this epoch that have begun, also before it was resumed; None outside of an iteration."""
        if (self._has_ended and not self.fetched) or not (self._position or self.source.begins_at_once):
            return None
        return self._position - len(self.fetched)

    @property
    def used(self) -> int | None:
        """Number of steps of this epoch that have begun; None between epochs, also once the last step has begun."""
        begun = self.begun
        return None if begun is None or (self.length is not None and begun >= self.length) else begun

    def _stop(self) -> None:
        """Drop all batches that were fetched ahead; generators of loaders then have their states before these."""
        if self.prefetcher is not None:
            self.prefetcher.close()
        self._forget_fetched()
        self._steps = iter(())

    @override
    def reset(self) -> None:
        self._stop()  # before its workers end
        self.source.reset(self)

    def close(self) -> None:
        """Drop the source with its process group, because Lightning keeps a reference to the loader."""
        self.reset()
        self.source, self.prefetcher = EvenSource(), None

    def _state_dicts(self) -> list[dict[str, Any]]:
        if self.rng is None:
            return super()._state_dicts()
        return [{POSITION: self.used or 0, WORLD_SIZE: self.source.world_size}]

    def _load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        if self.rng is None:
            super()._load_state_dicts(states)
            return
        state = next((state for state in states if POSITION in state), {})
        self.skip, ranks = state.get(POSITION, 0), state.get(WORLD_SIZE, self.source.world_size)
        if self.skip and ranks != self.source.world_size:
            self.source.check_ranks(ranks)


class EvenSource(StepSource):
    """Steps of ranks with different batches, equally many on each; ranks do not agree on anything."""

    begins_at_once = True  # as Lightning's own loader does

    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size

    @override
    def steps(self, loader: StepLoader, skip: int) -> Steps:
        length = sized_len(loader)
        combined = combine_part(loader, loader.flattened)
        combined.limits = loader.limits
        counted = CountedBatches(combined, loader.prefetcher, length)
        if loader.rng is None:
            batches = iter(counted)
        else:
            looks_ahead = loader.looks_ahead and length is None
            batches = loader.rng.iterate(counted, loader.flattened, skip, looks_ahead)
        for passed in range(skip):
            if next(batches, None) is None:
                raise UnsupportedFeatureError(
                    f"the checkpoint was saved after {skip} batches of an epoch, which has only {passed} now. Resume"
                    " with the same data, batch size and number of ranks, or from a checkpoint of the end of an epoch."
                )
        return ((step, FetchedBatch(samples)) for step, samples in batches)

    @override
    def check_ranks(self, ranks: int) -> None:
        rank_zero_warn(
            f"The checkpoint was saved by {ranks} ranks in the middle of an epoch, and {self.world_size} resume"
            " it: some samples of this epoch are seen twice or never. Resume on as many ranks, or from a checkpoint"
            " of the end of an epoch; `balanced_ddp` continues an epoch on any number of ranks."
        )


def combine_part(loader: StepLoader, part: list[Any]) -> CombinedLoader:
    """Combine loaders that contribute to the same steps: one in mode "sequential", all in other modes."""
    mode = combination_mode(loader)
    combined = CombinedLoader(part if mode == "sequential" else loader.iterables, mode)  # type: ignore[arg-type]
    combined.flattened = part
    return combined


def combined_lengths(loader: StepLoader, lengths: Sequence[float | None]) -> list[float]:
    """Return the number of batches, given the numbers of the loaders: for each in mode "sequential", else for all."""
    known = [UNLIMITED if length is None else length for length in lengths]
    limited = [min(pair) for pair in zip(known, loader.limits or repeat(UNLIMITED), strict=False)]
    mode = combination_mode(loader)
    if mode == "sequential":
        return limited
    if mode == "max_size_cycle" and not min(limited):
        return [0]  # nothing to begin the cycle again with
    return [min(limited) if mode == "min_size" else max(limited)]


def limit_of(loader: StepLoader, batches: float) -> int | None:
    """Return how many of these batches a loop takes at most; None if it sets no limit, as under Fabric."""
    return None if loader.limits is None or batches == UNLIMITED else int(batches)


def iterables_and_mode(given: Any, is_training: bool) -> tuple[Any, Any]:
    """Return the arguments with which Lightning combines the loaders of a loop."""
    if isinstance(given, CombinedLoader):
        return given.iterables, combination_mode(given)
    return given, "max_size_cycle" if is_training else "sequential"


def combine_evenly(
    given: Any,
    is_training: bool,
    world_size: int = 1,
    rng: ResumableRng | None = None,
    prefetcher: Any = None,
    looks_ahead: bool = True,
) -> CombinedLoader:
    """Combine the loaders of a loop for even steps; training with an `rng` resumes.

    A loader with a state resumes by itself. A class that the user has derived from `CombinedLoader` stays, unless it is
    made to resume.
    """
    combined = StepLoader(*iterables_and_mode(given, is_training), EvenSource(world_size), rng, prefetcher, looks_ahead)
    stateful = [one for one in combined.flattened if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]
    if stateful and rng is not None:
        rng.is_bypassed = True
    if stateful and prefetcher is not None:
        rank_zero_warn(
            f"`prefetch` has no effect on `{type(stateful[0]).__name__}`, a loader with a state, which counts the"
            " batches that it has fetched rather than used. Leave `prefetch` out, or use a loader without `state_dict`."
        )
    if stateful:
        combined.rng = combined.prefetcher = None
    is_own = isinstance(given, CombinedLoader) and type(given) is not CombinedLoader
    return given if is_own and combined.rng is None else combined

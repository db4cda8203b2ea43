"""The training data of a run that resumes within an epoch: its position, and the same random batches again."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from typing_extensions import override

from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.ranks.loaders import LOOKAHEAD, CountedCombinedLoader, combine_counted, iterables_and_mode
from lightning_ddp_ext.resume.rng_state import (
    capture_rng_state,
    capture_states,
    find_loader_rngs,
    restore_rng_state,
    restore_states,
)

T = TypeVar("T")

RngState = dict[str, Any]
"""The result of `capture_rng_state`, and under `"loaders"` of `capture_states`."""


@dataclass(frozen=True, slots=True)
class FetchRecord:
    """The RNG states that a rank needs to resume at its position in the data; plain values for a checkpoint."""

    has_begun: bool  # within an epoch
    start: RngState  # at the start of the epoch's iteration
    ahead: tuple[RngState, ...]  # before the fetch of each batch that has not been used yet
    now: RngState


class ResumableRng:
    """Restores the RNG state of this process while a run that resumes within an epoch fetches its batches.

    Loaders draw when an iteration begins (order, seeds of workers) and during a fetch (transforms). So a resumed run
    begins the iteration from the RNG state at the start of the epoch; fetches the used batches once more; fetches each
    batch that was ahead from the RNG state before its first fetch; and restores the RNG state of the interruption, in
    generators that are attributes of loaders, samplers and datasets too.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._resumed: FetchRecord | None = None
        self._has_begun = self._has_replayed = self._has_advanced = False
        self.is_bypassed = False  # loaders resume by themselves, and nothing is replayed
        self.loaders: list[Any] = []  # of the current iteration
        # Of the generators in loaders after the fetch of the last batch that was used, if a thread fetches ahead.
        self.loader_states: list[Any] | None = None
        self._start = self.capture()
        self._states: deque[RngState] = deque(maxlen=LOOKAHEAD)
        self._fetched = self._used = 0
        self.looks_ahead = True  # batches are fetched before they are used; may be set until the first fetch

    def resume(self, record: FetchRecord) -> None:
        """Let the next iteration continue at the position of a record."""
        self._resumed = record

    def advance(self) -> None:
        """Restore the RNG state of the interruption. Call before every step and its fetch."""
        is_first, self._has_advanced = not self._has_advanced, True
        if self._resumed is None:
            return
        if self._has_replayed or self.is_bypassed:
            self._finish_replay(self._resumed)  # other code may have drawn since the replay
        elif self._has_begun and not self._resumed.has_begun:
            self._resumed = None
        elif is_first and not self._has_begun:
            self._restore(self._resumed.now)

    def advance_between_epochs(self) -> None:
        """Restore the RNG state of the interruption, and abandon an iteration that has begun; instead of `advance`."""
        if self._resumed is not None:
            self._restore(self._resumed.now)
        self._resumed = None
        self._has_advanced = True

    def record(self, used: int | None, keeps_loaders: bool = True) -> FetchRecord:
        """Return the record for `used` batches of this epoch, None between epochs."""
        now = self.capture()
        if used is None:
            # Other loaders in the next epoch have other generators.
            now = now if keeps_loaders else {**now, "loaders": []}
            return FetchRecord(False, now, (), now)
        if self._resumed is not None and not self._has_begun:
            return replace(self._resumed, now=now)
        ahead = max(0, self._fetched - used) if self.looks_ahead else 0
        return FetchRecord(True, self._start, tuple(self._states)[len(self._states) - ahead :], now)

    def begin(self, loaders: Iterable[object], used: int = 0, looks_ahead: bool = True) -> None:
        """Prepare an iteration over loaders, of which the first `used` batches will be skipped."""
        self.loaders = list(loaders)
        if self._resumed is not None:
            if self._has_advanced:  # other code, such as a validation, may have drawn since `advance`
                self._resumed = replace(self._resumed, now=self.capture())
            self._restore(self._resumed.start)
            if self._has_advanced and not self._resumed.has_begun:
                self._resumed = None
        self._has_begun = True
        self._start = self.capture()
        self._states.clear()
        self._fetched, self._used, self.looks_ahead = 0, used, looks_ahead

    def fetch(self, fetch_next: Callable[[], T]) -> T:
        """Fetch the next batch from its RNG state."""
        self._seek()
        state = self.capture() if self.looks_ahead else None
        try:
            batch = fetch_next()
        except StopIteration:
            if self._resumed is not None:
                self._finish_replay(self._resumed)
            raise
        self._fetched += 1
        if state is not None:
            self._states.append(state)
        self._seek()
        return batch

    def iterate(
        self, source: Iterable[T], loaders: Iterable[object], used: int = 0, looks_ahead: bool = True
    ) -> Iterator[T]:
        """Iterate over a source with `begin` and `fetch`."""
        self.begin(loaders, used, looks_ahead)
        batches = iter(source)
        while True:
            try:
                batch = self.fetch(batches.__next__)
            except StopIteration:
                return
            yield batch

    def capture(self) -> RngState:
        """Return the RNG state of this process and of its loaders."""
        ahead = self.loader_states
        loaders = capture_states(find_loader_rngs(self.loaders)) if ahead is None else ahead
        return {**capture_rng_state(self._device), "loaders": loaders}

    @property
    def is_resuming(self) -> bool:
        """Whether RNG states will be restored."""
        return self._resumed is not None

    def _restore(self, state: RngState) -> None:
        restore_rng_state(state, self._device)
        restore_states(find_loader_rngs(self.loaders), state["loaders"])

    def _seek(self) -> None:
        """Restore the RNG state of the next batch's first fetch or, after the last of these, of the interruption."""
        resumed, ahead = self._resumed, self._fetched - self._used
        if resumed is None or not resumed.has_begun or ahead < 0:
            return
        if ahead < len(resumed.ahead):
            self._restore(resumed.ahead[ahead])
        else:
            self._finish_replay(resumed)

    def _finish_replay(self, resumed: FetchRecord) -> None:
        """Restore the RNG state of the interruption; `advance` does it once more if no step has been made yet."""
        self._restore(resumed.now)
        self._has_replayed = True
        if self._has_advanced:
            self._resumed = None


POSITION = "position"
WORLD_SIZE = "world_size"


class ResumableCombinedLoader(CountedCombinedLoader):
    """A `CombinedLoader` that skips the batches that an interrupted run has used."""

    def __init__(
        self, iterables: Any, mode: Any, rng: ResumableRng, world_size: int, may_look_ahead: bool = True
    ) -> None:
        super().__init__(iterables, mode)
        self._world_size = world_size
        self._rng = rng
        self._may_look_ahead = may_look_ahead  # False if `training_step` fetches its batches itself
        self._length: int | None = None
        self._position = self._skip = 0
        self._has_ended = True

    @override
    def __iter__(self) -> "ResumableCombinedLoader":
        skip, self._skip = self._skip, 0
        self.stop_prefetching()  # sets generators of loaders back
        self._rng.begin(self.flattened, skip)
        super().__iter__()
        self._length = sized_len(self)
        self._rng.looks_ahead = self._looks_ahead
        self._position, self._has_ended = 0, False
        for passed in range(skip):
            if next(self, None) is None:
                raise UnsupportedFeatureError(
                    f"the checkpoint was saved after {skip} batches of an epoch, which has only {passed} now. Resume"
                    " with the same data, batch size and number of ranks, or from a checkpoint of the end of an epoch."
                )
        self.fetched.clear()
        return self

    @override
    def __next__(self) -> tuple[Any, int, int]:
        try:
            fetched = self._rng.fetch(super().__next__)
        except StopIteration:
            self._has_ended = True
            raise
        self._position += 1
        return fetched

    @property
    def used(self) -> int | None:
        """Number of batches of this epoch that have been used; None between epochs."""
        if self._has_ended or self._position == self._length:
            return None
        return max(0, self._position - self._looks_ahead)

    @property
    def _looks_ahead(self) -> bool:
        # Without a length, Lightning fetches one batch ahead to recognise the last batch.
        return self._may_look_ahead and self._length is None

    def _state_dicts(self) -> list[dict[str, Any]]:
        return [{POSITION: self.used or 0, WORLD_SIZE: self._world_size}]

    def _load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        state = state_with_position(states)
        self._skip, ranks = state.get(POSITION, 0), state.get(WORLD_SIZE, self._world_size)
        if self._skip and ranks != self._world_size:
            rank_zero_warn(
                f"The checkpoint was saved by {ranks} ranks in the middle of an epoch, and {self._world_size} resume"
                " it: some samples of this epoch are seen twice or never. Resume on as many ranks, or from a checkpoint"
                " of the end of an epoch; `balanced_ddp` continues an epoch on any number of ranks."
            )


def state_with_position(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a loader of this package from a checkpoint, or an empty dictionary."""
    return next((state for state in states if POSITION in state), {})


def loader_with_state(combined: CombinedLoader) -> Any | None:
    """Return the first loader that resumes by itself, or None."""
    return next(
        (one for one in combined.flattened if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")), None
    )


def warn_of_prefetching(loader: object) -> None:
    """Warn that the batches of a loader with a state are not prefetched."""
    rank_zero_warn(
        f"`prefetch` has no effect on `{type(loader).__name__}`, a loader with a state, which counts the batches that"
        " it has fetched rather than used. Leave `prefetch` out, or use a loader without `state_dict`."
    )


def make_resumable(
    given: Any, rng: ResumableRng, world_size: int, may_look_ahead: bool, prefetcher: Any
) -> CombinedLoader:
    """Combine the loaders of a training loop so that they resume; a loader with a state resumes by itself."""
    iterables, mode = iterables_and_mode(given, is_training=True)
    combined = ResumableCombinedLoader(iterables, mode, rng, world_size, may_look_ahead)
    if (stateful := loader_with_state(combined)) is not None:
        rng.is_bypassed = True
        if prefetcher is not None:
            warn_of_prefetching(stateful)
        return combine_counted(given, is_training=True)
    combined.prefetcher = prefetcher
    return combined

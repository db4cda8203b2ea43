"""The same random batches again in a run that resumes within an epoch."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from lightning_ddp_ext.ranks.sample_counts import LOOKAHEAD
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

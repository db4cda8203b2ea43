"""Fetching the same batches again in a run that resumes within an epoch, random ones included."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_ddp_ext.ranks.sample_counts import LOOKAHEAD
from lightning_ddp_ext.resume.rng_state import (
    capture_rng_state,
    capture_states,
    find_loader_rngs,
    restore_rng_state,
    restore_states,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RngState:
    """States of random generators.

    Attributes:
        of_process: Those of the process, see `capture_rng_state`.
        of_loaders: Those that loaders have of their own, see `capture_states`.
    """

    of_process: Tensor
    of_loaders: list[Any]


@dataclass(frozen=True, slots=True)
class FetchRecord:
    """Where a rank was with its batches.

    Attributes:
        has_begun: Whether it was within an epoch.
        start: RNG state when the epoch's iteration began.
        ahead: RNG state before each fetch of a batch that had not been used yet.
        now: RNG state when the record was made.
    """

    has_begun: bool
    start: RngState
    ahead: tuple[RngState, ...]
    now: RngState

    def pack(self) -> tuple[Tensor, list[Any]]:
        """Return it as a tensor of bytes, equally long on every rank, and what loaders have of their own."""
        states = [self.start, self.now, *self.ahead]
        numbers = torch.zeros_like(self.now.of_process)
        numbers[0] = self.has_begun
        filling = [numbers] * (LOOKAHEAD - len(self.ahead))
        of_process = torch.stack([numbers, *(state.of_process for state in states), *filling])
        return of_process, [state.of_loaders for state in states]

    @classmethod
    def unpack(cls, of_process: Tensor, of_loaders: list[Any]) -> "FetchRecord":
        """Undo `pack`."""
        numbers, *states = of_process
        start, now, *ahead = map(RngState, states, of_loaders)  # as many as there are of loaders
        return cls(bool(numbers[0]), start, tuple(ahead), now)


class ResumableRng:
    """Knows the RNG state of this process while it fetches batches.

    Batches may depend on them in three ways: the order of samples, and the seeds of workers, are drawn when an
    iteration begins; a transform in this process draws when a batch is fetched. A run that resumes in the middle of an
    epoch therefore begins the iteration from the same states, passes over the batches that have been used, fetches the
    next ones from the states that these were fetched from, and goes on from the states at which it was interrupted.
    Generators that loaders, their samplers and datasets have of their own are treated alike.

    Batches that are passed over are fetched once more, since nothing else tells where a loader or its workers would be.

    Args:
        device: A CUDA device whose generator counts too.

    Attributes:
        loaders: What is iterated over, if it is known.
        looks_ahead: Whether batches are fetched before they are used.
        is_bypassed: Whether loaders resume by themselves.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._resumed: FetchRecord | None = None
        self._has_begun = self._is_back = self._is_going = False
        self.is_bypassed = False
        self.loaders: list[Any] = []
        self._start = self._capture()
        self._states: deque[RngState] = deque(maxlen=LOOKAHEAD)
        self._fetched = self._used = 0
        self.looks_ahead = True

    def resume(self, record: FetchRecord) -> None:
        """Let the next iteration go on where a record was made."""
        self._resumed = record
        self._has_begun = self._is_back = self._is_going = False

    def leave_to_loaders(self) -> None:
        """Let loaders resume by themselves: only the states of the interruption matter."""
        self.is_bypassed = True

    def advance(self) -> None:
        """Have the RNG state of the interruption; to be called before every step, and its fetch."""
        is_first, self._is_going = not self._is_going, True
        if self._resumed is None:
            return
        if self._is_back or self.is_bypassed:
            self._finish_replay(self._resumed)  # something else may have drawn meanwhile
        elif self._has_begun and not self._resumed.has_begun:
            self._resumed = None
        elif is_first and not self._has_begun:
            self._restore(self._resumed.now)

    def advance_between_epochs(self) -> None:
        """Have the RNG state of the interruption; instead of `advance`. An iteration that has begun is given up."""
        if self._resumed is not None:
            self._restore(self._resumed.now)
        self._resumed = None
        self._is_going = True

    def record(self, used: int | None, keeps_loaders: bool = True) -> FetchRecord:
        """Say where this rank is.

        Args:
            used: How many batches of this epoch have been used; None between epochs.
            keeps_loaders: Whether the next epoch has the same loaders.
        """
        now = self._capture()
        if used is None:
            now = now if keeps_loaders else replace(now, of_loaders=[])
            return FetchRecord(False, now, (), now)
        if self._resumed is not None and not self._has_begun:
            return replace(self._resumed, now=now)
        ahead = max(0, self._fetched - used) if self.looks_ahead else 0
        return FetchRecord(True, self._start, tuple(self._states)[len(self._states) - ahead :], now)

    def begin(self, loaders: Iterable[object], used: int = 0, looks_ahead: bool = True) -> None:
        """Prepare for an iteration that begins.

        Args:
            loaders: What is iterated over.
            used: How many batches are going to be passed over.
            looks_ahead: Whether batches are fetched before they are used; may be set until the first one is fetched.
        """
        self.loaders = list(loaders)
        if self._resumed is not None:
            if self._is_going:  # something may have drawn since `advance`, such as a validation
                self._resumed = replace(self._resumed, now=self._capture())
            self._restore(self._resumed.start)
            if self._is_going and not self._resumed.has_begun:
                self._resumed = None
        self._has_begun = True
        self._start = self._capture()
        self._states.clear()
        self._fetched, self._used, self.looks_ahead = 0, used, looks_ahead

    def fetch(self, fetch_next: Callable[[], T]) -> T:
        """Fetch the next batch; raises what the function raises."""
        self._seek()
        state = self._capture() if self.looks_ahead else None
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

    def _seek(self) -> None:
        """Have the RNG state that the next batch was fetched from, or those of the interruption."""
        resumed, ahead = self._resumed, self._fetched - self._used
        if resumed is None or not resumed.has_begun or ahead < 0:
            return
        if ahead < len(resumed.ahead):
            self._restore(resumed.ahead[ahead])
        else:
            self._finish_replay(resumed)

    def _finish_replay(self, resumed: FetchRecord) -> None:
        """Have the RNG state of the interruption; for good if steps are made already."""
        self._restore(resumed.now)
        self._is_back = True
        if self._is_going:
            self._resumed = None

    def iterate(
        self, source: Iterable[T], loaders: Iterable[object], used: int = 0, looks_ahead: bool = True
    ) -> Iterator[T]:
        """Iterate over a source; other arguments are those of `begin`."""
        self.begin(loaders, used, looks_ahead)
        batches = iter(source)
        while True:
            try:
                batch = self.fetch(batches.__next__)
            except StopIteration:
                return
            yield batch

    def _capture(self) -> RngState:
        return RngState(capture_rng_state(self._device), capture_states(find_loader_rngs(self.loaders)))

    def _restore(self, states: RngState) -> None:
        restore_rng_state(states.of_process, self._device)
        restore_states(find_loader_rngs(self.loaders), states.of_loaders)

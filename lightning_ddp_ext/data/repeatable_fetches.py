"""Fetching the same batches again in a run that resumes within an epoch, random ones included."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_ddp_ext.data.own_generators import OwnGenerator, capture_states, find_generators, restore_states
from lightning_ddp_ext.data.random_states import capture_random_states, restore_random_states

T = TypeVar("T")

LOOKAHEAD = 2  # batches that are fetched before they are needed, at most: one by the loop, one by a vote of the ranks


@dataclass(frozen=True, slots=True)
class FetchRecord:
    """Where a rank was with its batches.

    Attributes:
        has_begun: Whether it was within an epoch.
        start: Random states when the epoch's iteration began.
        ahead: Random states before each fetch of a batch that had not been used yet.
        now: Random states when the record was made.
        of_loaders: States of the loaders' own generators at `start`, see `find_generators`.
    """

    has_begun: bool
    start: Tensor
    ahead: tuple[Tensor, ...]
    now: Tensor
    of_loaders: list[Any] = field(default_factory=list)

    def pack(self) -> Tensor:
        """Return it as a tensor of bytes, equally long on every rank, except for `of_loaders`."""
        ahead = [*self.ahead, *[self.now] * (LOOKAHEAD - len(self.ahead))]
        numbers = torch.zeros_like(self.now)
        numbers[:2] = torch.tensor([self.has_begun, len(self.ahead)])
        return torch.stack([numbers, self.start, self.now, *ahead])

    @classmethod
    def unpack(cls, packed: Tensor, of_loaders: list[Any]) -> "FetchRecord":
        """Undo `pack`."""
        numbers, start, now, *ahead = packed
        return cls(bool(numbers[0]), start, tuple(ahead[: int(numbers[1])]), now, of_loaders)


class RepeatableFetches:
    """Knows the random states of this process while it fetches batches.

    Batches may depend on them in three ways: the order of samples, and the seeds of workers, are drawn when an
    iteration begins; a transform in this process draws when a batch is fetched. A run that resumes in the middle of an
    epoch therefore begins the iteration from the same states, passes over the batches that have been used, fetches the
    next ones from the states that these were fetched from, and goes on from the states at which it was interrupted.
    Generators that loaders, samplers and datasets have for themselves only need the states they began with.

    Batches that are passed over are fetched once more, since nothing else tells where a loader or its workers would be.

    Args:
        device: A CUDA device whose generator counts too.

    Attributes:
        looks_ahead: Whether batches are fetched before they are used.
        is_bypassed: Whether loaders resume by themselves.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._resumed: FetchRecord | None = None
        self._has_begun = self._is_back = self._is_going = False
        self.is_bypassed = False
        self._start = self._capture()
        self._generators: list[OwnGenerator] = []
        self._of_loaders: list[Any] = []
        self._owed: list[Any] = []  # states of the loaders' generators, until steps are made from them
        self._states: deque[Tensor] = deque(maxlen=LOOKAHEAD)
        self._fetched = self._used = 0
        self.looks_ahead = True

    def resume(self, record: FetchRecord) -> None:
        """Let the next iteration go on where a record was made."""
        self._resumed = record
        self._owed = record.of_loaders
        self._has_begun = self._is_back = self._is_going = False

    def resume_loaders(self, of_loaders: list[Any]) -> None:
        """Let the next iteration draw from the loaders' own generators as one that was recorded, and nothing else."""
        self._owed = of_loaders

    def leave_to_loaders(self) -> None:
        """Let loaders resume by themselves: only the states of the interruption matter."""
        self.is_bypassed = True

    def go_on(self) -> None:
        """Have the random states of the interruption; to be called before every step, and its fetch."""
        is_first, self._is_going = not self._is_going, True
        if self._has_begun:
            self._owed = []
        if self._resumed is None:
            return
        if self._is_back or self.is_bypassed:
            self._come_back(self._resumed)  # something else may have drawn meanwhile
        elif self._has_begun and not self._resumed.has_begun:
            self._resumed = None
        elif is_first and not self._has_begun:
            restore_random_states(self._resumed.now, self._device)

    def go_on_between_epochs(self) -> None:
        """Have the random states of the interruption; instead of `go_on`. An iteration that has begun is given up."""
        if self._resumed is not None:
            restore_random_states(self._resumed.now, self._device)
        self._resumed = None
        self._is_going, self._has_begun = True, False

    def record(self, used: int | None) -> FetchRecord:
        """Say where this rank is.

        Args:
            used: How many batches of this epoch have been used; None between epochs.
        """
        now = self._capture()
        if used is None:
            return FetchRecord(False, now, (), now, capture_states(self._generators))
        if self._resumed is not None and not self._has_begun:
            return replace(self._resumed, now=now)
        ahead = max(0, self._fetched - used) if self.looks_ahead else 0
        return FetchRecord(True, self._start, tuple(self._states)[len(self._states) - ahead :], now, self._of_loaders)

    def begin(self, loaders: Iterable[object], used: int = 0, looks_ahead: bool = True) -> None:
        """Prepare for an iteration that begins.

        Args:
            loaders: What is iterated over.
            used: How many batches are going to be passed over.
            looks_ahead: Whether batches are fetched before they are used; may be set until the first one is fetched.
        """
        self._generators = find_generators(*loaders)
        if self._owed and not restore_states(self._generators, self._owed):
            warnings.warn(
                "The loaders have other random generators of their own than when the checkpoint was saved, so that"
                " random numbers will be others than without interruption. Resume with the same loaders.",
                stacklevel=2,
            )
        if self._is_going:
            self._owed = []
        if self._resumed is not None:
            if self._is_going:  # something may have drawn since `go_on`, such as a validation
                self._resumed = replace(self._resumed, now=self._capture())
            restore_random_states(self._resumed.start, self._device)
            if self._is_going and not self._resumed.has_begun:
                self._resumed = None
        self._has_begun = True
        self._start = self._capture()
        self._of_loaders = capture_states(self._generators)
        self._states.clear()
        self._fetched, self._used, self.looks_ahead = 0, used, looks_ahead

    def fetch(self, fetch_next: Callable[[], T]) -> T:
        """Fetch the next batch; raises what the function raises."""
        self._set_back()
        state = self._capture() if self.looks_ahead else None
        try:
            batch = fetch_next()
        except StopIteration:
            if self._resumed is not None:
                self._come_back(self._resumed)
            raise
        self._fetched += 1
        if state is not None:
            self._states.append(state)
        self._set_back()
        return batch

    def _set_back(self) -> None:
        """Have the random states that the next batch was fetched from, or those of the interruption."""
        resumed, ahead = self._resumed, self._fetched - self._used
        if resumed is None or not resumed.has_begun or ahead < 0:
            return
        if ahead < len(resumed.ahead):
            restore_random_states(resumed.ahead[ahead], self._device)
        else:
            self._come_back(resumed)

    def _come_back(self, resumed: FetchRecord) -> None:
        """Have the random states of the interruption; for good if steps are made already."""
        restore_random_states(resumed.now, self._device)
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

    def _capture(self) -> Tensor:
        return capture_random_states(self._device)

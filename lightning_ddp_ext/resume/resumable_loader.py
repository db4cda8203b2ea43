"""The training data of a run that resumes within an epoch."""

from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from typing_extensions import override

from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.ranks.sample_counts import (
    CountedCombinedLoader,
    FetchAhead,
    combine_counted,
    iterables_and_mode,
)
from lightning_ddp_ext.resume.resumable_rng import ResumableRng

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
                " it: some samples of this epoch are seen twice or never. Use `ddp_join` to deal out the rest."
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
    given: Any, rng: ResumableRng, world_size: int, may_look_ahead: bool, prefetcher: FetchAhead | None
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

"""Training in lockstep that resumes in the middle of an epoch, on the same or another number of ranks."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from typing_extensions import override

from lightning_ddp_ext.data.lockstep_loader import UnevenInputs, Votes
from lightning_ddp_ext.data.repeatable_fetches import RepeatableFetches
from lightning_ddp_ext.data.unpadded_sampler import UnpaddedDistributedSampler
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.integration.lockstep.combined_loader import ENDLESS, LockstepCombinedLoader
from lightning_ddp_ext.integration.lockstep.ranked_loaders import RankedLoader
from lightning_ddp_ext.integration.ranks.resumable_data import POSITION, WORLD_SIZE, position_in

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
        votes: See `LockstepCombinedLoader`.
        fetches: Knows the random states of this process.
        reload_after_epoch: Called if this epoch has another length than the next one, with what to do between them.
    """

    def __init__(
        self,
        iterables: Any,
        mode: Any,
        group: dist.ProcessGroup,
        uneven_inputs: UnevenInputs,
        votes: Votes,
        fetches: RepeatableFetches,
        reload_after_epoch: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__(iterables, mode, group, uneven_inputs, votes)
        self._fetches = fetches
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
        steps = self._position - len(self.turns)
        has_ended = self._has_ended and not self.turns
        length = sized_len(self)
        return None if has_ended or (length is not None and steps >= length) else steps

    @override
    def _fetched(self, combined: CombinedLoader, skip: int, looks_ahead: bool) -> Iterable[tuple[Any, int, int]]:
        return self._fetches.iterate(combined, self.flattened, skip, looks_ahead)

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

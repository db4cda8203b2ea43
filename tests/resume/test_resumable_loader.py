"""Loaders that begin where an interrupted run has ended, on one rank; see `test_preemption_integration` for several."""

import pytest
from torch.utils.data import DataLoader

from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.join.combined_loader import RankedLoader, ResumableLockstepLoader
from lightning_ddp_ext.join.lockstep_loader import HasNextBatch
from lightning_ddp_ext.join.samplers import UnpaddedDistributedSampler
from lightning_ddp_ext.resume.resumable_loader import POSITION, WORLD_SIZE, ResumableCombinedLoader
from lightning_ddp_ext.resume.resumable_rng import ResumableRng


def test_an_epoch_that_is_shorter_than_the_one_that_was_left_is_refused():
    combined = ResumableCombinedLoader(DataLoader(range(3)), "max_size_cycle", ResumableRng(), 1)
    combined._load_state_dicts([{POSITION: 5, WORLD_SIZE: 1}])
    with pytest.raises(UnsupportedFeatureError, match="after 5 batches of an epoch, which has only 3 now"):
        iter(combined)


def make_lockstep(group, between):
    sampler = UnpaddedDistributedSampler(range(10), 1, 0, shuffle=False)
    loader = RankedLoader(DataLoader(range(10), batch_size=2, sampler=sampler), group)
    lockstep = ResumableLockstepLoader(
        [loader], "max_size_cycle", group, "join", HasNextBatch(group), ResumableRng(), between.append
    )
    lockstep.limits = [float("inf")]
    return lockstep, sampler


def test_a_checkpoint_of_ddp_checkpoint_is_resumed_by_ddp_join(group):
    lockstep, _ = make_lockstep(group, [])
    lockstep._load_state_dicts([{POSITION: 3, WORLD_SIZE: 1}])
    assert [batch.tolist() for (batch,), _, _ in lockstep] == [[6, 7], [8, 9]]
    with pytest.raises(UnsupportedFeatureError, match="saved by 2 ranks"):
        lockstep._load_state_dicts([{POSITION: 3, WORLD_SIZE: 2}])


def test_what_was_left_of_an_epoch_is_all_there_in_the_next(group):
    between = []
    lockstep, sampler = make_lockstep(group, between)
    state = {POSITION: 2, WORLD_SIZE: 2, "before": 0, "dealt": [], "taken": [4, 2]}
    lockstep._load_state_dicts([state])
    assert len(sampler) == 4
    (undo,) = between
    undo()
    assert list(sampler) == list(range(10))

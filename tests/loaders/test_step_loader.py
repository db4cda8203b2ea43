"""The steps of a loader of several loaders, which begins where an interrupted run has ended, on one rank."""

import pytest
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.loaders.lockstep_source import LockstepSource, RankedLoader
from lightning_ddp_ext.loaders.step_loader import POSITION, WORLD_SIZE, EvenSource, StepLoader
from lightning_ddp_ext.resume.rng_state import ResumableRng


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def even(data):
    return StepLoader(DataLoader(data, batch_size=2), "max_size_cycle", EvenSource(2), ResumableRng())


def lockstep(data, group):
    loader = RankedLoader(DataLoader(data, batch_size=2), group)
    return StepLoader(loader, "max_size_cycle", LockstepSource(group, "join"), ResumableRng())


def test_an_epoch_that_is_shorter_than_the_one_that_was_left_is_refused():
    combined = even(range(6))
    combined._load_state_dicts([{POSITION: 5, WORLD_SIZE: 2}])
    with pytest.raises(UnsupportedFeatureError, match="after 5 batches of an epoch, which has only 3 now"):
        iter(combined)


def test_ddp_join_resumes_a_checkpoint_of_as_many_ranks_and_refuses_another_number(group):
    combined = lockstep(range(10), group)
    combined.limits = [float("inf")]
    combined._load_state_dicts([{POSITION: 3, WORLD_SIZE: 1}])  # as `ddp_checkpoint` saves it
    assert [batch.tolist() for batch, _, _ in combined] == [[6, 7], [8, 9]]
    combined._load_state_dicts([{POSITION: 0, WORLD_SIZE: 2}])  # the end of an epoch
    assert [batch.tolist() for batch, _, _ in combined][::4] == [[0, 1], [8, 9]]
    with pytest.raises(UnsupportedFeatureError, match=r"saved by 2 ranks .* end of an epoch; `balanced_ddp` continues"):
        combined._load_state_dicts([{POSITION: 3, WORLD_SIZE: 2}])


@pytest.mark.parametrize("kind", ["even", "lockstep"])
@pytest.mark.parametrize("data", [range(10), Stream()], ids=["sized", "stream"])
def test_the_position_is_the_number_of_steps_that_have_begun(group, kind, data):
    combined = even(data) if kind == "even" else lockstep(data, group)
    world_size = 2 if kind == "even" else 1
    assert combined.used is None
    found = []
    for _ in range(2):
        for _, batch_idx, _ in combined:
            if batch_idx == 0 and isinstance(data, Stream):
                assert combined.used == 0
                continue  # as Lightning does: the step begins when the next batch has been fetched
            fetched = combined.fetched.popleft()
            assert fetched.position == (batch_idx - isinstance(data, Stream), 0)
            found.append(combined._state_dicts())
        if combined.fetched:
            combined.fetched.popleft()
        assert combined.used is None
    last = 5 - isinstance(data, range)
    expected = [*range(1, last + 1)] + [0] * isinstance(data, range)
    assert found == [[{POSITION: number, WORLD_SIZE: world_size}] for number in expected[: len(found) // 2]] * 2


def test_a_step_that_fetches_its_batches_itself_has_used_all_that_were_fetched():
    combined = StepLoader(DataLoader(Stream(), 2), "max_size_cycle", EvenSource(), ResumableRng(), looks_ahead=False)
    batches = iter(combined)
    for number in (1, 2, 3):
        next(batches)
        assert (combined.used, len(combined.fetched)) == (number, 0)


@pytest.mark.parametrize("kind", ["even", "lockstep"])
def test_lightning_may_drop_its_own_iterator(group, kind):
    """As it may after 2.6, where loaders lose the attribute `_iterator`."""
    combined = even(range(6)) if kind == "even" else lockstep(range(6), group)
    vars(combined).pop("_iterator", None)
    for _ in range(2):
        assert len(combined) == len(list(combined)) == 3
        combined.reset()
    combined.close()
    assert len(combined) == 3

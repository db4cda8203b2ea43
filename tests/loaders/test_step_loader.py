"""The steps of a loader of several loaders, which begins where an interrupted run has ended, on one rank."""

import itertools

import pytest
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.loaders.lockstep_source import LockstepSource, RankedLoader
from lightning_ddp_ext.loaders.step_loader import POSITION, WORLD_SIZE, EvenSource, StepLoader
from lightning_ddp_ext.resume.rng_state import ResumableRng
from tests.support.fake_group import run_ranks


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
def test_the_position_is_the_number_of_steps_that_have_begun(group, kind):
    combined = even(range(10)) if kind == "even" else lockstep(range(10), group)
    assert combined.used is None
    for _ in range(2):
        steps, found = iter(combined), []
        for _ in range(5):
            next(steps)  # as the loop does, before a step begins
            found.append((combined.begun, combined.used))
            combined.fetched.popleft()
            found.append((combined.begun, combined.used))
        expected = [0, *(number for number in range(1, 5) for _ in range(2)), 5]
        assert found == [(number, number if number < 5 else None) for number in expected]
        assert next(steps, None) is combined.begun is None


@pytest.mark.parametrize("kind", ["even", "lockstep"])
def test_a_batch_that_is_fetched_to_see_if_there_is_another_does_not_count(group, kind):
    combined = even(Stream()) if kind == "even" else lockstep(Stream(), group)
    steps = iter(combined)
    assert [next(steps)[1], combined.used] == [0, 0]
    for number in range(1, 5):
        next(steps)
        assert combined.fetched.popleft().position == (number - 1, 0)
        assert combined._state_dicts()[0][POSITION] == combined.used == number
    assert next(steps, None) is None
    assert combined.used == 4
    combined.fetched.popleft()
    assert combined.used is None


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


@pytest.mark.filterwarnings("ignore:a loader has 4 batches now")
def test_ranks_exchange_lengths_once_at_the_start_of_an_epoch_and_see_what_hooks_add():
    def run(group):
        sent, exchange = [], group.exchange
        group.exchange = lambda tensor: sent.append(1) or exchange(tensor)
        data = [*range(2 + group.rank)]
        combined = StepLoader(
            RankedLoader(DataLoader(data), group), "max_size_cycle", LockstepSource(group, "join"), ResumableRng()
        )
        found, counts = [], [len(sent)]
        for _ in range(2):
            steps = iter(combined)
            counts.append(len(sent))
            if not found:
                data.append(7)  # as `on_train_epoch_start` may do
            next(steps)
            counts.append(len(sent))
            found.append(1 + len([*iter(steps.__next__, None)]))  # `list` would begin again
            counts.append(len(sent))
        return found, [after - before for before, after in itertools.pairwise(counts)]

    for found, sent in run_ranks(2, run):
        assert found == [4, 4]
        at_iteration, at_first_step, _, *second = sent
        assert (at_iteration, *second[:2]) == (0, at_first_step, 0)
        assert at_first_step > 0

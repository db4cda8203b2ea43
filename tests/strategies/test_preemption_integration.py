"""Runs that are told to end at some moment, and go on as if nothing had happened."""

import pytest

from tests.strategies import preemption_ranks as ranks
from tests.strategies import redealing_ranks as redealing
from tests.strategies.preemption_cases import CASES, SAVED, SAVED_WITHIN
from tests.support.processes import run_processes

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank has; one launch for all cases."""
    return run_processes(ranks.run_all, 2, str(tmp_path_factory.mktemp("runs")), timeout=500)


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_leaves_and_resumes_ends_as_the_whole_one(found, name):
    for by_name in found:
        case = by_name[name]
        assert case.interrupted.digests, "left before its first batch"
        assert len(case.interrupted.digests) < len(case.whole.digests), "was not interrupted"
        assert case.interrupted.digests + case.resumed.digests == case.whole.digests
        assert case.interrupted.steps + case.resumed.steps == case.whole.steps
        assert case.interrupted.validated + case.resumed.validated == case.whole.validated


@pytest.mark.parametrize("name", CASES)
def test_ranks_leave_after_the_same_batch_with_one_checkpoint(found, name):
    first, second = (by_name[name] for by_name in found)
    assert first.interrupted.digests == second.interrupted.digests
    assert first.files == second.files == ["hpc_ckpt_1.ckpt"]
    assert first.code == second.code == 128 + CASES[name].signum


def test_random_numbers_matter(found):
    """The control: ranks draw different ones, and so does each run that does not restore them."""
    assert found[0]["within an epoch"].whole.digests != found[0]["in the uneven phase"].whole.digests
    assert len(set(found[0]["within an epoch"].whole.digests)) == len(found[0]["within an epoch"].whole.digests)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return run_processes(ranks.run_saved, 2, str(tmp_path_factory.mktemp("saved")), timeout=300)


PLACES = [f"end: {name}" for name in SAVED] + [f"within: {name}" for name in SAVED_WITHIN]


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_a_callback_saves_resumes_as_the_whole_one(saved, place):
    for whole, resumed in (by_place[place] for by_place in saved):
        batches, validations = whole.saved
        assert 0 < batches < len(whole.digests)
        is_at_end = whole.steps[batches - 1][0] < whole.steps[batches][0]
        assert is_at_end == place.startswith("end"), "was saved somewhere else"
        assert resumed.digests == whole.digests[batches:]
        assert resumed.steps == whole.steps[batches:]
        assert resumed.validated == whole.validated[validations:]


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Samples by rank until an epoch is interrupted on two ranks, and when three resume it."""
    folder = str(tmp_path_factory.mktemp("others"))
    steps = [1, 4, 5, 6]  # the ranks have 16 and 15 samples, in batches of 3; 6 is the last one
    before = run_processes(redealing.save_within_an_epoch, 2, folder, steps, timeout=120)
    run_processes(redealing.save_streams, 2, folder, timeout=120)
    after = run_processes(redealing.resume_on_others, 3, folder, steps, timeout=120)
    refused = run_processes(redealing.refuse_on_others, 3, folder, timeout=120)
    return steps, before, after, refused


@pytest.mark.slow
def test_what_is_left_of_an_epoch_is_dealt_out_on_another_number_of_ranks(others):
    steps, before, after, _ = others
    for number in range(len(steps)):
        until = [index for by_rank in before for index in by_rank[number]]
        rest = [index for by_rank in after for index in by_rank[number][0]]
        assert sorted(until + rest) == list(range(31))
        assert until
        assert bool(rest) == (steps[number] < 6)
        following = [index for by_rank in after for index in by_rank[number][1]]
        assert sorted(following) == list(range(31))


@pytest.mark.slow
def test_fewer_ranks_begin_the_next_epoch_after_the_last_batch(tmp_path):
    """Their epochs have more batches than the one that was saved."""
    last = [4]  # of 11 and 10 samples
    before = run_processes(redealing.save_within_an_epoch, 3, str(tmp_path), last, timeout=120)
    assert sorted(index for by_rank in before for index in by_rank[0]) == list(range(31))
    after = run_processes(redealing.resume_on_others, 2, str(tmp_path), last, timeout=120)
    assert [rest for ((rest, _),) in after] == [[], []]
    assert sorted(index for ((_, following),) in after for index in following) == list(range(31))


@pytest.mark.slow
def test_more_ranks_go_on_with_what_a_sampler_has_drawn(tmp_path):
    """Its generator is another one on each rank, and has advanced."""
    before = run_processes(redealing.save_what_is_drawn, 2, str(tmp_path), timeout=120)
    after = run_processes(redealing.resume_what_is_drawn, 3, str(tmp_path), timeout=120)
    assert all(before)
    assert sorted(index for by_rank in (*before, *after) for index in by_rank) == list(range(31))


@pytest.mark.slow
def test_streams_and_several_loaders_refuse_another_number_of_ranks(others):
    for by_rank in others[3]:
        for message in by_rank:
            assert "UnsupportedFeatureError: the checkpoint was saved by 2 ranks in the middle of an epoch" in message
            assert "Resume on 2 ranks" in message

import pytest
import torch

from tests.join import metric_ranks as ranks
from tests.support.processes import RankError, RankTimeoutError, run_processes


@pytest.fixture(scope="module")
def found():
    return run_processes(ranks.synchronize, 3, timeout=60)


def test_lists_of_any_length_are_gathered_and_given_back(found):
    for rank, own in enumerate(found):
        assert sorted(own["entries"]) == [[0.0, 0.0], [1.0], [1.0], [2.0]]
        assert own["numbers"] == [1.0, 2.0, 2.0]
        assert own["shared"] == 3
        assert own["kept"] == rank


def test_what_torchmetrics_pickles_is_refused_where_ranks_differ(found):
    assert [own["equal"] for own in found] == [["rank 0", "rank 1", "rank 2"]] * 3
    expected = "`Texts` keeps 0 to 2 entries of `texts` on ranks 0 to 2"
    assert all(expected in own["unequal"] for own in found)


def test_states_take_the_form_of_ranks_that_have_made_an_update(found):
    for own in found:
        assert own["number"] == (0.75, [0.25, 0.5])
        assert own["vector"] == ([0.75, 1.5, 2.25], [0.25, 0.5, 0.5, 0.75, 1.0, 1.5])
        assert own["alike"] == ([3.0], [0.0, 1.0, 2.0])
        assert "`total` of `Sums` has the shapes [1], [2], [3] on ranks 0 to 2" in own["apart"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [[], [3]])
def test_torchmetrics_alone_mixes_up_states_of_another_form(shape):
    """The control: the process ends, or a rank has something else."""
    try:
        found = run_processes(ranks.synchronize_other_forms, 2, shape, timeout=20)
    except (RankTimeoutError, RankError):
        return
    expected = torch.full(shape, 0.25).tolist()
    assert [total for total, _ in found] != [expected] * 2


@pytest.mark.slow
def test_torchmetrics_alone_waits_for_entries_that_there_are_not():
    with pytest.raises((RankTimeoutError, RankError), match="in barrier"):  # that of the other rank's next entry
        run_processes(ranks.synchronize_in_vain, 2, timeout=20)

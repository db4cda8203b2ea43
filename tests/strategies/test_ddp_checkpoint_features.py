"""Features of Lightning under `ddp_checkpoint`: they work, and leave ranks identical. One launch for all."""

import pytest

from tests.strategies import feature_ranks as ranks
from tests.support.processes import run_processes

MISMATCHES = {
    "different modules": "`network.2.weight` is",
    "different arguments": "argument `bucket_cap_mb` is 5 on rank 0 but 6 on rank 1",
}
FEATURES = [name for name in ranks.NAMES if name not in MISMATCHES]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return run_processes(ranks.fit_features, 2, folder, timeout=200)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_works_and_leaves_ranks_identical(found, name):
    for rank, by_name in enumerate(found):
        assert not by_name[name][1], f"rank {rank}: {by_name[name][1]}"
    assert found[0][name][0] == found[1][name][0] != ""


def test_the_mean_over_an_odd_number_of_samples_is_right():
    """Lightning takes the mean of the ranks' numbers of samples, and would truncate the mean of 1 and 2."""
    assert run_processes(ranks.log_ones, 2, timeout=60) == [{"training": 1.0, "validation": 1.0}] * 2


def test_a_batch_without_weight_on_all_ranks_is_skipped_under_a_gradient_scaler():
    """torch's scaler stops at an optimizer without any gradient."""
    with_it, without = (run_processes(ranks.fit_scaled, 2, sizes, timeout=100) for sizes in ([3, 1, 4], [3, 4]))
    assert with_it[0] == with_it[1] == without[0] == without[1]
    assert without != run_processes(ranks.fit_scaled, 2, [3, 2, 4], timeout=100)


def test_recomputed_layers_change_nothing(found):
    assert found[0]["recomputed layers"][0] == found[0]["plain"][0]


@pytest.mark.parametrize(("name", "message"), MISMATCHES.items())
def test_different_setups_of_ranks_are_refused_before_the_first_step(found, name, message):
    for by_name in found:
        assert "ReplicaMismatchError: ranks are not set up alike" in by_name[name][1]
        assert message in by_name[name][1]

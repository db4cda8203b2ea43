import pytest

from lightning_ddp_ext.parallel.weighting import check_weight_by, combination_weights


def test_samples_weigh_by_their_number():
    assert combination_weights("samples", ["a", "b"], [2, 6]) == [0.25, 0.75]


def test_ranks_weigh_the_same():
    assert combination_weights("ranks", ["a", "b"], [2, 6]) == [0.5, 0.5]


def test_sums_are_added():
    assert combination_weights("sum", ["a", "b"], [2, 6]) == [1.0, 1.0]


def test_a_callable_counts_each_chunk():
    assert combination_weights(len, ["abc", "d"], [1, 1]) == [0.75, 0.25]


@pytest.mark.parametrize("counts", [[0, 0], [-1, 3]])
def test_counts_that_cannot_be_weights_are_refused(counts):
    with pytest.raises(ValueError, match="above zero for at least one"):
        combination_weights(lambda chunk: counts[chunk], [0, 1], [1, 1])


@pytest.mark.parametrize("value", ["sample", 3, None])
def test_unknown_names_are_refused(value):
    with pytest.raises(ValueError, match="`weight_by` must be one of 'samples', 'ranks', 'sum'"):
        check_weight_by(value)


@pytest.mark.parametrize("value", ["samples", "ranks", "sum", len])
def test_known_names_and_callables_are_accepted(value):
    check_weight_by(value)

import pytest

from lightning_ddp_ext.batches.weights import GradientWeights, check_weight_by, combination_weights


def test_samples_weigh_by_their_number():
    assert combination_weights("samples", ["a", "b"], [2, 6]) == [0.25, 0.75]


def test_ranks_weigh_the_same():
    assert combination_weights("equal", ["a", "b"], [2, 6]) == [0.5, 0.5]


def test_sums_are_added():
    assert combination_weights("sum", ["a", "b"], [2, 6]) == [1.0, 1.0]


def test_a_callable_counts_each_chunk():
    assert combination_weights(len, ["abc", "d"], [1, 1]) == [0.75, 0.25]


@pytest.mark.parametrize("counts", [[-1, 3], [float("nan"), 1], [float("inf"), 1]])
def test_counts_that_cannot_be_weights_are_refused(counts):
    with pytest.raises(ValueError, match="Return a finite number of at least 0 for every chunk"):
        combination_weights(lambda chunk: counts[chunk], [0, 1], [1, 1])


def test_a_batch_of_which_nothing_counts_has_no_gradient():
    assert combination_weights(float, [0, 0], [1, 1]) == [0.0, 0.0]


@pytest.mark.parametrize("value", ["sample", 3, None])
def test_unknown_names_are_refused(value):
    with pytest.raises(ValueError, match="`weight_by` must be one of 'samples', 'equal', 'sum'"):
        check_weight_by(value)


@pytest.mark.parametrize("value", ["samples", "equal", "sum", len])
def test_known_names_and_callables_are_accepted(value):
    check_weight_by(value)


def test_equal_micro_batches_need_no_factor():
    weights = GradientWeights("equal")
    factors = []
    for batch in "abc":
        weights.set_batch(batch)
        factors.append(weights.add_batch())
    assert factors == [1.0, 1.0, 1.0]
    assert weights.pop() == (3.0, 1.0)


def test_micro_batches_weigh_by_their_size_against_the_first():
    weights = GradientWeights("samples")
    factors = []
    for size in (4, 2, 8):
        weights.set_batch("batch", size)
        factors.append(weights.add_batch())
    assert factors == [1.0, 0.5, 2.0]
    assert weights.pop() == (14.0, 4.0)
    assert weights.pop() == (0.0, 0.0)


def test_a_micro_batch_that_counts_nothing_leaves_the_others_as_they_are():
    weights = GradientWeights(float)
    factors = []
    for tokens in (0, 3, 0, 6):
        weights.set_batch(tokens)
        factors.append(weights.add_batch())
    assert factors == [0.0, 1.0, 0.0, 2.0]
    assert weights.pop() == (9.0, 3.0)


def test_a_batch_counts_once_between_two_synchronisations():
    weights = GradientWeights(float)
    weights.set_batch(5)
    weights.add_batch(), weights.add_batch()
    assert weights.pop() == (5.0, 5.0)
    weights.add_batch()
    assert weights.pop() == (5.0, 5.0)


def test_a_skipped_micro_batch_counts_for_logged_values_only():
    weights = GradientWeights(float)
    weights.set_batch(5)
    weights.skip_batch()
    assert (weights.batch_weight, weights.in_gradient) == (5.0, 0.0)
    for _ in range(2):
        assert weights.add_batch() == 0.0
        assert weights.pop() == (0.0, 0.0)
    weights.set_batch(3)
    assert weights.in_gradient == 3.0
    assert weights.add_batch() == 1.0


def test_an_unfinished_window_is_forgotten():
    weights = GradientWeights(float)
    weights.set_batch(5)
    weights.add_batch()
    weights.restart()
    weights.set_batch(3)
    weights.add_batch()
    assert weights.pop() == (3.0, 3.0)


def test_a_sum_of_sums_is_not_divided():
    weights = GradientWeights("sum")
    for batch in "ab":
        weights.set_batch(batch)
        assert weights.add_batch() == 1.0
    assert weights.is_sum
    assert weights.pop() == (2.0, 1.0)


def test_no_batch_counts_nothing():
    weights = GradientWeights("samples")
    weights.set_batch("batch", 2)
    weights.add_batch()
    weights.set_no_batch()
    assert weights.add_batch() == 0.0
    assert weights.pop() == (2.0, 2.0)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_weight_is_a_finite_number(weight):
    weights = GradientWeights(lambda batch: weight)
    with pytest.raises(ValueError, match=r"`weight_by` returned .* Return a finite number of at least 0"):
        weights.set_batch("a")

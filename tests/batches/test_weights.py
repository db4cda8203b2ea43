import pytest

from lightning_ddp_ext.batches.weights import GradientWeights, check_weight_by, combination_weights


@pytest.mark.parametrize(
    ("weight_by", "chunks", "sizes", "expected"),
    [
        ("samples", ["a", "b"], [2, 6], [0.25, 0.75]),
        ("equal", ["a", "b"], [2, 6], [0.5, 0.5]),
        ("sum", ["a", "b"], [2, 6], [1.0, 1.0]),
        (len, ["abc", "d"], [1, 1], [0.75, 0.25]),
        (float, [0, 0], [1, 1], [0.0, 0.0]),
    ],
)
def test_chunks_are_weighted_by_samples_equally_as_sums_or_with_a_callable(weight_by, chunks, sizes, expected):
    check_weight_by(weight_by)
    assert combination_weights(weight_by, chunks, sizes) == expected


@pytest.mark.parametrize("value", ["sample", 3, None])
def test_unknown_names_are_refused(value):
    with pytest.raises(ValueError, match="`weight_by` must be one of 'samples', 'equal', 'sum'"):
        check_weight_by(value)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_weight_is_a_finite_number_of_at_least_0(weight):
    with pytest.raises(ValueError, match="Return a finite number of at least 0 for every chunk"):
        combination_weights(lambda chunk: chunk, [weight, 3], [1, 1])
    with pytest.raises(ValueError, match=r"`weight_by` returned .* Return a finite number of at least 0"):
        GradientWeights(lambda batch: weight).set_batch("a")


@pytest.mark.parametrize(
    ("weight_by", "batches", "factors", "popped"),
    [
        ("equal", [("a", 4), ("b", 2), ("c", 8)], [1.0, 1.0, 1.0], (3.0, 1.0)),
        ("samples", [("a", 4), ("b", 2), ("c", 8)], [1.0, 0.5, 2.0], (14.0, 4.0)),
        ("sum", [("a", 4), ("b", 2)], [1.0, 1.0], (2.0, 1.0)),
        (float, [(0, 1), (3, 1), (0, 1), (6, 1)], [0.0, 1.0, 0.0, 2.0], (9.0, 3.0)),  # weight 0 changes no other
    ],
)
def test_micro_batches_are_weighted_relative_to_the_first(weight_by, batches, factors, popped):
    weights = GradientWeights(weight_by)
    found = []
    for batch, samples in batches:
        weights.set_batch(batch, samples)
        found.append(weights.add_batch())
    assert found == factors
    assert weights.pop() == popped
    assert weights.pop() == (0.0, 0.0)
    assert weights.is_sum is (weight_by == "sum")


def test_a_skipped_micro_batch_has_weight_for_logged_values_only():
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


def test_a_batch_is_added_once_and_an_unfinished_window_or_a_rank_without_batch_adds_no_weight():
    weights = GradientWeights(float)
    weights.set_batch(5)
    weights.add_batch(), weights.add_batch()
    assert weights.pop() == (5.0, 5.0)
    weights.add_batch()
    assert weights.pop() == (5.0, 5.0)
    weights.add_batch()
    weights.restart()
    weights.set_batch(3)
    weights.add_batch()
    weights.set_no_batch()
    assert weights.add_batch() == 0.0
    assert weights.pop() == (3.0, 3.0)

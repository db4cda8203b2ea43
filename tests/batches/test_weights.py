import pytest

from lightning_ddp_ext.batches.weights import WeightRule


def test_chunks_are_weighted_by_samples_equally_as_sums_or_with_a_callable():
    for weight_by, chunks, sizes, expected in (
        ("samples", ["a", "b"], [2, 6], [0.25, 0.75]),
        ("equal", ["a", "b"], [2, 6], [0.5, 0.5]),
        ("sum", ["a", "b"], [2, 6], [1.0, 1.0]),
        (len, ["abc", "d"], [1, 1], [0.75, 0.25]),
        (float, [0, 0], [1, 1], [0.0, 0.0]),
    ):
        rule = WeightRule(weight_by, print)
        assert rule.normalize([rule.weigh(*pair) for pair in zip(chunks, sizes, strict=True)]) == expected


def test_unknown_names_and_weights_that_are_no_finite_number_of_at_least_0_are_refused():
    for value in ("sample", 3, None):
        with pytest.raises(ValueError, match="`weight_by` must be one of 'samples', 'tokens', 'equal', 'sum'"):
            WeightRule(value, print)
    for weight in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"`weight_by` returned .* Return a finite number of at least 0"):
            WeightRule(lambda batch, weight=weight: weight, print).weigh("a", 1)

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from lightning_ddp_ext import ClassWeights, TokenCount
from lightning_ddp_ext.batches.weights import WeightRule

IDS = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
LABELS = torch.tensor([[5, 6, 7, 8], [5, 6, -100, -100]])
CAUSAL = {"input_ids": IDS, "labels": LABELS}
MASKED = {"input_ids": IDS, "labels": torch.tensor([[-100, 9, -100, -100], [-100, 9, -100, -100]])}
Pair = namedtuple("Pair", ["inputs", "labels"])


def test_labels_are_counted_wherever_they_are():
    for batch, count, expected in (
        ({"labels": LABELS}, TokenCount(), 6),
        (SimpleNamespace(labels=LABELS), TokenCount(), 6),
        (Pair(IDS, LABELS), TokenCount(), 6),
        ((IDS, LABELS), TokenCount(labels=1), 6),
        ((IDS, LABELS), TokenCount(labels=-1), 6),
        ({"targets": LABELS}, TokenCount(labels="targets"), 6),
        ({"y": LABELS}, TokenCount(labels=lambda batch: batch["y"][0]), 4),
        ({"labels": [LABELS[0], LABELS[1, :2]]}, TokenCount(), 6),
        ({"labels": LABELS + 0}, TokenCount(ignore_index=5), 6),
        ({"labels": LABELS[:, 0]}, TokenCount(), 2),
        ({"labels": LABELS[:, 2:]}, TokenCount(shift=True), 1),
        ({"labels": torch.full((2, 3), -100)}, TokenCount(), 0),
    ):
        assert count(batch) == expected, batch


def test_the_first_label_of_a_row_is_left_out_if_labels_equal_the_inputs():
    assert TokenCount()(CAUSAL) == 4
    assert TokenCount(shift=False)(CAUSAL) == 6
    assert TokenCount()({**CAUSAL, "decoder_input_ids": IDS}) == 6  # an encoder-decoder model that repeats its inputs
    assert TokenCount()(MASKED) == 2
    assert TokenCount(shift=True)(MASKED) == 2
    count = TokenCount()
    nothing = {**CAUSAL, "labels": torch.full_like(LABELS, -100)}
    assert [count(nothing), count(MASKED), count(CAUSAL)] == [0, 2, 6]  # a masked model may keep some tokens
    count = TokenCount()
    assert count(CAUSAL) == 4
    with pytest.raises(ValueError, match=r"in earlier batches, all labels were equal to `input_ids`.*shift=True"):
        count(MASKED)


def test_the_strategy_says_once_what_the_weights_are():
    for weight_by, batch, expected in (
        ("tokens", CAUSAL, "number of `labels` without -100 and the first of each row"),
        ("tokens", MASKED, "number of `labels` without -100."),
        (TokenCount(labels=lambda batch: batch["labels"], ignore_index=0, shift=False), CAUSAL, "labels without 0."),
    ):
        said = []
        rule = WeightRule(weight_by, said.append)
        for _ in range(2):
            rule.weigh(batch, 1.0)
        (sentence,) = said
        assert expected in sentence
    for weight_by in ("samples", len):
        said.clear()
        WeightRule(weight_by, said.append).weigh(CAUSAL, 1.0)
        assert not said


def test_class_weights_are_the_divisor_of_the_loss():
    weight, logits = torch.tensor([0.5, 2.0, 3.0]), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 2, -100, 1])
    loss = torch.nn.functional.cross_entropy(logits, labels, weight)
    summed = torch.nn.functional.cross_entropy(logits, labels, weight, reduction="sum")
    assert ClassWeights(weight)((logits, labels)) == pytest.approx(float(summed / loss))
    assert ClassWeights(weight, labels="y", ignore_index=2)({"y": labels[:2]}) == 0.5
    with pytest.raises(ValueError, match=r"`weight` must be a tensor with one weight per class, got \[1, 3\]"):
        ClassWeights(weight[None])


def test_batches_without_labels_are_refused():
    for batch, count, problem in (
        ((IDS, LABELS), TokenCount(), "'labels' of a batch of type tuple is None"),
        ({"labels": IDS.double()}, TokenCount(), "'labels' of a batch of type dict is a torch.float64 tensor"),
        ({"labels": "positive"}, TokenCount(), "'labels' of a batch of type dict is <class 'str'>"),
        ((IDS,), ClassWeights(torch.ones(2)), "1 of a batch of type tuple is None"),
        ({}, TokenCount(labels=lambda batch: batch.get("y")), "its function of a batch of type dict is None"),
    ):
        with pytest.raises(
            ValueError, match=rf"`weight_by` counts labels, and {problem}.*`{type(count).__name__}\(labels"
        ):
            count(batch)


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
    for weight in (-1, float("nan"), float("inf"), None, torch.ones(2)):
        with pytest.raises(ValueError, match=r"`weight_by` returned .* Return a finite number of at least 0"):
            WeightRule(lambda batch, weight=weight: weight, print).weigh("a", 1)

"""A batch is read in one way or refused."""

from typing import NamedTuple

import pytest
import torch

from lightning_ddp_ext.batches.splitting import batch_size_of, split_batch
from lightning_ddp_ext.errors import BatchSplitError


class Sample(NamedTuple):
    x: torch.Tensor
    label: int


def image(height=4):
    return torch.zeros(3, height, 4)


def boxes(n):
    return {"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)}


@pytest.mark.parametrize(
    ("batch", "readings"),
    [
        # lists of samples that a collate function has left as they were: the rows are channels, features, tokens
        ([{"image": image(height), "label": 1} for height in (4, 5, 6, 4)], "`batch` has 3 or 4"),
        ([(image(), 0), (image(), 1)], "`batch` has 3 or 2"),
        ([Sample(torch.zeros(5), 0), Sample(torch.zeros(5), 1)], "`batch` has 5 or 2"),
        ([{"ids": torch.zeros(7)}, {"ids": torch.zeros(5)}], r"`batch` has 2, `batch\[0\]\['ids'\]` has 7"),
        # as many boxes as images
        ({"pixels": torch.zeros(2, 3, 4, 4), "labels": [boxes(2), boxes(2)]}, "`batch.*` has 2 entries of 2 rows"),
        # mappings that are samples or views
        ({"views": [{"x": torch.zeros(8, 2)}, {"x": torch.zeros(8, 2)}]}, r"`batch\['views'\]` has 8 or 2"),
        # columns of texts, as the default collate function makes them, or rows
        ([("a", "b", "c"), ("x", "y", "z")], "`batch` has 3 or 2"),
        # one column of texts, or one sample of several; and one without labels
        ([("a", "b", "c")], "`batch` has 3 or 1"),
        ([["a", "b", "c"], None], "`batch` has 3 or 2"),
        ({"text": ["a", "b", "c"], "tag": ["x", "y"]}, r"`batch\['text'\]` has 3, `batch\['tag'\]` has 2"),
    ],
)
def test_two_readings_are_refused_and_named(batch, readings):
    with pytest.raises(BatchSplitError, match=f"ambiguous: {readings}.* define `scatter_batch"):
        batch_size_of(batch)


def test_only_the_first_entries_of_a_long_list_are_named():
    with pytest.raises(BatchSplitError) as caught:
        batch_size_of([torch.zeros(n) for n in range(1, 100)])
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ({"text": ["a", "b", "c"], "label": [0, 1, 2]}, 3),
        ({"input_ids": [[1, 2], [3], [4, 5, 6]], "labels": [0, 1, 0]}, 3),
        ([("a", 0), ("b", 1), ("c", 0)], 3),
        ([{"text": "a"}, {"text": "b"}], 2),
        ((tuple(image() for _ in range(4)), tuple(boxes(1) for _ in range(4))), 4),
        (([image(), image()], [boxes(3), boxes(3)]), 2),
        ((tuple(image(4 + n) for n in range(2)), [0, 1]), 2),
        ({"pixels": torch.zeros(2, 3, 4, 4), "labels": [boxes(2), boxes(1)]}, 2),
        ({"pixels": torch.zeros(1, 3, 4, 4), "labels": [boxes(1)]}, 1),
        ([{"a": torch.zeros(6)}, {"b": torch.zeros(6, 2)}], 6),
        ({"a": [torch.zeros(6, 2), torch.zeros(6)], "b": [torch.zeros(6, 2), torch.zeros(6)]}, 6),
    ],
)
def test_one_reading_is_taken(batch, size):
    assert batch_size_of(batch) == size
    sizes = [1, size - 1] if size > 1 else [1]
    assert [batch_size_of(chunk) for chunk in split_batch(batch, sizes)] == sizes


@pytest.mark.parametrize("other", [0.5, "train", {"ids": [1, 2, 3]}], ids=["number", "text", "mapping"])
def test_entries_of_several_kinds_are_columns(other):
    first, second = split_batch((["a", "b", "c"], other), [1, 2])
    assert (first[0], second[0]) == (["a"], ["b", "c"])
    expected = ({"ids": [1]}, {"ids": [2, 3]}) if isinstance(other, dict) else (other, other)
    assert (first[1], second[1]) == expected


def test_one_sample_that_was_not_collated_is_not_cut_into_its_columns():
    with pytest.raises(BatchSplitError, match="`tuple` has no tensor"):
        split_batch(("a text", 3), [1, 1])


def test_samples_of_one_kind_are_cut_one_by_one():
    for batch in ([1, 2.5, True], ["a", None, "b"], [["a"], ["b", "c"], []], [{"a": ["x"]}, {"a": ["y"]}, {"b": 1}]):
        assert split_batch(batch, [1, 2]) == [batch[:1], batch[1:]]


@pytest.mark.parametrize("batch", [{"a": torch.zeros(8), "b": torch.zeros(4)}, [torch.zeros(8), torch.zeros(4)]])
def test_loaders_of_different_batch_sizes_are_refused(batch):
    with pytest.raises(BatchSplitError, match=r"ambiguous: `batch\[.*\]` has 8, `batch\[.*\]` has 4"):
        batch_size_of(batch)

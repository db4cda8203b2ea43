import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_ddp_ext.batches.splitting import join_batches
from lightning_ddp_ext.errors import BatchSplitError


def test_samples_are_joined_along_the_batch_dimension_and_common_values_stay():
    parts = [
        {"x": torch.full((3, size), float(size)), "name": "a", "scale": torch.tensor(torch.nan), "table": torch.ones(3)}
        for size in (2, 5)
    ]
    joined = join_batches(parts, batch_dim=1)
    assert joined["x"].tolist() == [[2.0] * 2 + [5.0] * 5] * 3
    assert (joined["name"], joined["table"].tolist()) == ("a", [1, 1, 1])


def test_lists_of_samples_and_arrays_are_joined():
    parts = [{"boxes": [torch.ones(n, 4) for n in (3, 1, 4)[:size]], "ids": numpy.arange(size)} for size in (3, 2)]
    joined = join_batches(parts)
    assert [len(boxes) for boxes in joined["boxes"]] == [3, 1, 4, 3, 1]
    assert joined["ids"].tolist() == [0, 1, 2, 0, 1]
    assert join_batches([["a", "b"], ["c"]]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], r"`batch` cannot be joined, it is shape \(2, 3\) and shape \(2, 4\)"),
        ([(torch.ones(2), 0.5), (torch.ones(2), 0.7)], r"`batch\[1\]` cannot be joined, it is 0.5 and 0.7"),
        ([{"x": torch.ones(2)}, {"y": torch.ones(2)}], "`batch` cannot be joined"),
        ([{"x": torch.ones(2), "t": torch.ones(5, 0)}] * 2, "the batch size is ambiguous"),
        ([pack_sequence([torch.ones(3)])] * 2, "cut in another way"),
        # Names of four classes, which look like those of four samples.
        ([{"x": torch.ones(2), "classes": ["a", "b", "c", "d"]}] * 2, "cut in another way"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts, message):
    with pytest.raises(BatchSplitError, match=message):
        join_batches(parts)

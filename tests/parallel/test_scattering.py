from typing import NamedTuple

import pytest
import torch

from lightning_ddp_ext.errors import BatchSplitError
from lightning_ddp_ext.parallel.scattering import batch_size_of, gather, split_batch

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def rows(n, width=2):
    return torch.arange(n * width).reshape(n, width)


@pytest.mark.parametrize(
    "batch",
    [
        rows(5),
        [rows(5), torch.arange(5)],
        (rows(5), {"mask": torch.ones(5, 3), "id": ["a", "b", "c", "d", "e"]}),
        {"deep": [{"x": rows(5)}, (torch.arange(5), None)], "scale": torch.tensor(2.0), "name": "n"},
        Pair(rows(5), torch.arange(5)),
        ([torch.zeros(3, 4), torch.zeros(3, 2), torch.zeros(3, 4), torch.zeros(1), torch.zeros(2)], [{}] * 5),
        ["a", "b", "c", "d", "e"],
    ],
)
def test_samples_are_counted(batch):
    assert batch_size_of(batch) == 5


def test_the_batch_dimension_can_be_another_one():
    batch = {"sequence": torch.zeros(7, 5, 3), "labels": torch.zeros(7, 5)}
    assert batch_size_of(batch, batch_dim=1) == 5
    first, second = split_batch(batch, [2, 3], batch_dim=1)
    assert first["sequence"].shape == (7, 2, 3)
    assert second["labels"].shape == (7, 3)


def test_a_detection_batch_is_cut_into_images_and_targets():
    images = [torch.zeros(3, size, size) for size in (4, 5, 6)]
    targets = [{"boxes": torch.zeros(n, 4)} for n in (1, 2, 0)]
    assert batch_size_of((images, targets)) == 3
    first, second = split_batch((images, targets), [1, 2])
    assert [image.shape[-1] for image in first[0]] == [4]
    assert [len(target["boxes"]) for target in second[1]] == [2, 0]


def test_disagreeing_sizes_are_named():
    with pytest.raises(BatchSplitError, match=r"ambiguous: `batch\['a'\]` has 8, `batch\['b'\]\[0\]` has 4"):
        batch_size_of({"a": rows(8), "b": [rows(4)]})


@pytest.mark.parametrize("batch", [torch.tensor(1.0), {"x": 3}, [], None])
def test_a_batch_without_samples_is_refused(batch):
    with pytest.raises(BatchSplitError, match="no tensor with dimension 0"):
        batch_size_of(batch)


def test_chunks_are_views_in_order_and_none_where_empty():
    batch = {"x": rows(6), "ids": list("abcdef"), "scale": torch.tensor(2.0), "name": "n"}
    empty, first, second = split_batch(batch, [0, 2, 4])
    assert empty is None
    assert first["x"].data_ptr() == batch["x"].data_ptr()
    assert torch.equal(torch.cat([first["x"], second["x"]]), batch["x"])
    assert first["ids"] == ["a", "b"]
    assert second["ids"] == ["c", "d", "e", "f"]
    assert first["scale"] is batch["scale"]
    assert second["name"] == "n"


def test_types_of_containers_are_kept():
    chunk = split_batch(Pair(rows(4), rows(4)), [1, 3])[1]
    assert isinstance(chunk, Pair)
    assert isinstance(split_batch([rows(4)], [4])[0], list)
    assert isinstance(split_batch((rows(4),), [4])[0], tuple)


def test_rows_are_concatenated_in_order():
    whole = {"logits": rows(5), "loss": torch.tensor(0.0)}
    parts = [{"logits": rows(5)[:2], "loss": torch.tensor(1.0)}, {"logits": rows(5)[2:], "loss": torch.tensor(6.0)}]
    gathered = gather(parts, [2, 3], CPU)
    assert torch.equal(gathered["logits"], whole["logits"])
    assert gathered["loss"] == pytest.approx((2 * 1.0 + 3 * 6.0) / 5)


def test_a_pair_of_outputs_is_not_taken_for_a_list_of_samples():
    parts = [[rows(2), torch.zeros(2)], [rows(2), torch.ones(2)]]
    gathered = gather(parts, [2, 2], CPU)
    assert [tensor.shape for tensor in gathered] == [(4, 2), (4,)]
    assert [tensor.shape for tensor in gather([tuple(p) for p in parts], [2, 2], CPU)] == [(4, 2), (4,)]


def test_lists_with_an_entry_per_sample_are_joined():
    assert gather([["a"], ["b", "c"]], [1, 2], CPU) == ["a", "b", "c"]
    assert gather([[{"n": 1}], [{"n": 2}, {"n": 3}]], [1, 2], CPU) == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_what_fits_nothing_comes_back_per_replica():
    assert gather([None, None], [1, 2], CPU) is None
    matrices = [torch.zeros(3, 3), torch.ones(3, 3)]
    gathered = gather(matrices, [1, 2], CPU)
    assert isinstance(gathered, list)
    assert torch.equal(gathered[1], matrices[1])

import collections
import dataclasses
import types
from typing import NamedTuple

import numpy
import pytest
import torch
import transformers

from lightning_ddp_ext.batches.splitting import batch_size_of, gather, split_batch
from lightning_ddp_ext.errors import BatchSplitError

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


def test_three_images_of_three_channels_are_not_cut_by_channel():
    images = [torch.zeros(3, 8, 8) for _ in range(3)]
    targets = [{"boxes": torch.zeros(n, 4)} for n in (1, 2, 0)]
    first, second = split_batch((images, targets), [1, 2])
    assert [image.shape for image in first[0] + second[0]] == [(3, 8, 8)] * 3


def test_targets_beside_a_tensor_of_images_are_cut():
    batch = {"pixel_values": torch.zeros(3, 3, 8, 8), "labels": [{"boxes": torch.zeros(n, 4)} for n in (1, 2, 0)]}
    assert batch_size_of(batch) == 3
    first, second = split_batch(batch, [1, 2])
    assert first["pixel_values"].shape[0] == 1
    assert [len(label["boxes"]) for label in second["labels"]] == [2, 0]


def test_several_views_of_two_samples_are_cut_by_rows():
    batch = ([rows(2), rows(2)], torch.zeros(2))
    first, _ = split_batch(batch, [1, 1])
    assert [view.shape for view in first[0]] == [(1, 2), (1, 2)]


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    names: list
    shape: tuple = (2, 2, 2)


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor


class Annotated(collections.UserDict):
    origin = None


def test_dataclasses_mappings_and_arrays_are_cut():
    user = Annotated(x=rows(2))
    user.origin = "kept"
    ordered = collections.OrderedDict(x=rows(2))
    encoding = transformers.BatchEncoding({"input_ids": rows(2), "attention_mask": rows(2)})
    proxy = types.MappingProxyType({"x": rows(2)})
    batch = [Sample(rows(2), ["a", "b"]), Slotted(rows(2)), user, ordered, encoding, proxy, numpy.zeros((2, 3))]
    assert batch_size_of(batch) == 2
    _, second = split_batch(batch, [1, 1])
    assert [type(part) for part in second] == [type(part) for part in batch]
    assert second[0].names == ["b"]
    assert second[0].shape == (2, 2, 2)
    assert second[0].x.shape == second[1].x.shape == second[2]["x"].shape == second[3]["x"].shape == (1, 2)
    assert second[2].origin == "kept"
    assert second[4]["input_ids"].tolist() == second[4].input_ids.tolist() == [[2, 3]]
    assert second[5]["x"].shape == (1, 2)
    assert second[6].shape == (1, 3)
    assert batch[4]["input_ids"].shape == (2, 2)  # the batch itself is untouched
    assert user["x"].shape == (2, 2)


def test_an_object_with_tensors_is_refused_by_its_name():
    class Graph:
        def __init__(self):
            self.edges = torch.zeros(3, 2)

    with pytest.raises(BatchSplitError, match=r"`batch\['graph'\]` of type `Graph` holds tensors but cannot be cut"):
        batch_size_of({"x": rows(4), "graph": Graph()})


def test_dataclass_outputs_are_gathered():
    parts = [Slotted(rows(1)), Slotted(rows(2))]
    assert gather(parts, [1, 2], CPU).x.shape == (3, 2)


def test_disagreeing_sizes_are_named():
    with pytest.raises(BatchSplitError, match=r"ambiguous: `batch\['a'\]` has 8, `batch\['b'\]` has 4"):
        batch_size_of({"a": rows(8), "b": [rows(4), torch.zeros(4)]})


def alike(count, size=3):
    return [torch.zeros(size, 4, 4) for _ in range(count)]


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ((alike(8), list(range(8))), 8),
        ((alike(8), [f"image {i}" for i in range(8)]), 8),
        ((alike(8), [{"boxes": torch.zeros(3, 4)} for _ in range(8)]), 8),
        ({"images": alike(8), "classes": ["cat", "dog"], "targets": [{"boxes": torch.zeros(5, 4)}] * 8}, 8),
        ({"x": rows(8), "classes": ["cat", "dog"], "shape": (8, 8)}, 8),
        ([torch.zeros(4, 2), torch.zeros(4, 2)], 4),
        ([[torch.zeros(4, 2), torch.zeros(4, 2)], torch.zeros(4)], 4),
        ([rows(2), alike(2)], 2),
        ({"a": [rows(6), torch.zeros(6)], "b": [rows(6), torch.zeros(6)]}, 6),
    ],
)
def test_lists_are_read_as_the_rest_of_the_batch_says(batch, size):
    assert batch_size_of(batch) == size
    chunks = split_batch(batch, [1, size - 1])
    assert [batch_size_of(chunk) for chunk in chunks] == [1, size - 1]


@pytest.mark.parametrize(
    "batch",
    [
        {"views": [torch.zeros(8, 2), torch.zeros(8, 2)]},
        (alike(8), alike(8)),
        {"a": alike(2, 8), "b": alike(2, 4)},
        {"a": [rows(8), torch.zeros(8)], "b": [rows(4), torch.zeros(4)]},
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(batch):
    with pytest.raises(BatchSplitError, match=r"the batch size is ambiguous: .*define `scatter_batch"):
        batch_size_of(batch)


def test_sizes_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match=r"must add up to the 8 samples of the batch, got \[1, 2\]"):
        split_batch(rows(8), [1, 2])


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


def test_a_batch_dimension_that_tensors_lack_is_refused():
    with pytest.raises(BatchSplitError, match="no tensor with dimension 2"):
        batch_size_of([rows(8), torch.zeros(8)], batch_dim=2)
    with pytest.raises(BatchSplitError, match=r"a tensor of shape \(8,\) has no dimension 1"):
        split_batch([torch.zeros(5, 8), torch.zeros(8)], [4, 4], batch_dim=1)


def test_an_empty_batch_is_refused():
    with pytest.raises(BatchSplitError, match="the batch has no samples"):
        batch_size_of(torch.zeros(0, 3))


def test_default_dictionaries_and_shapes_are_kept():
    batch = collections.defaultdict(list, x=rows(2), size=torch.Size((2, 3)))
    chunk = split_batch(batch, [1, 1])[0]
    assert chunk["size"] == (2, 3)
    assert chunk["missing"] == []

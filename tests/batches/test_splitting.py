"""Batches are cut into samples, or refused by name if ambiguous; outputs are gathered as on one device."""

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import attrs
import numpy
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pack_sequence

from lightning_ddp_ext.batches.splitting import count_samples, gather, join_batches, split_batch
from lightning_ddp_ext.errors import BatchSplitError

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


def rows(n, width=2):
    return torch.arange(n * width).reshape(n, width)


def alike(count, size=3):
    return [torch.zeros(size, 4, 4) for _ in range(count)]


def image(height=4):
    return torch.zeros(3, height, 4)


def boxes(n):
    return {"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)}


COUNTED = [
    # rows, of which properties of drawn batches are tested elsewhere
    (Pair(rows(5), torch.arange(5)), 5),
    ((rows(5), {"mask": torch.ones(5, 3), "id": ["a", "b", "c", "d", "e"]}), 5),
    # lists of samples beside rows
    (([torch.zeros(3, 4), torch.zeros(3, 2), torch.zeros(3, 4), torch.zeros(1), torch.zeros(2)], [{}] * 5), 5),
    ((alike(8), [f"image {i}" for i in range(8)]), 8),
    ({"images": alike(8), "classes": ["cat", "dog"], "targets": [{"boxes": torch.zeros(5, 4)}] * 8}, 8),
    ({"x": rows(8), "classes": ["cat", "dog"], "shape": (8, 8)}, 8),
    ([rows(2), alike(2)], 2),
    ((tuple(image() for _ in range(4)), tuple(boxes(1) for _ in range(4))), 4),
    (([image(), image()], [boxes(3), boxes(3)]), 2),
    (([image(3)] * 3, [boxes(1), boxes(2), boxes(0)]), 3),  # three images of three channels and rows
    ({"pixels": torch.zeros(2, 3, 4, 4), "labels": [boxes(2), boxes(1)]}, 2),
    ({"pixels": torch.zeros(1, 3, 4, 4), "labels": [boxes(1)]}, 1),
    # lists of columns
    ([[torch.zeros(4, 2), torch.zeros(4, 2)], torch.zeros(4)], 4),
    ({"a": [rows(6), torch.zeros(6)], "b": [rows(6), torch.zeros(6)]}, 6),
    # no tensors
    (["a", "b", "c", "d", "e"], 5),
    ({"input_ids": [[1, 2], [3], [4, 5, 6]], "labels": [0, 1, 0]}, 3),
    ([("a", 0), ("b", 1), ("c", 0)], 3),
    ([{"text": "a"}, {"text": "b"}], 2),
]


def test_samples_are_counted_in_a_batch_and_in_its_chunks():
    for batch, size in COUNTED:
        sizes = [1, size - 1] if size > 1 else [1]
        found = count_samples(batch), [count_samples(chunk) for chunk in split_batch(batch, sizes)]
        assert found == (size, sizes), batch


AMBIGUOUS = [
    # entries of different sizes
    ({"a": rows(8), "b": [rows(4), torch.zeros(4)]}, r"`batch\['a'\]` has 8, `batch\['b'\]` has 4"),
    ([torch.zeros(n) for n in range(1, 100)], r"`batch\[0\]` has 1, `batch\[1\]` has 2"),
    # lists of samples that a collate function has not collated: the rows are channels, features, tokens
    ([{"image": image(height), "label": 1} for height in (4, 5, 6, 4)], "`batch` has 3 or 4"),
    ([(image(), 0), (image(), 1)], "`batch` has 3 or 2"),
    ([Pair(torch.zeros(5), 0), Pair(torch.zeros(5), 1)], "`batch` has 5 or 2"),
    ([{"ids": torch.zeros(7)}, {"ids": torch.zeros(5)}], r"`batch` has 2, `batch\[0\]\['ids'\]` has 7"),
    # as many boxes as images
    ({"pixels": torch.zeros(2, 3, 4, 4), "labels": [boxes(2), boxes(2)]}, "`batch.*` has 2 entries of 2 rows"),
    # samples or views, or images of three channels
    (([rows(2), rows(2)], torch.zeros(2)), r"`batch\[0\]` has 2 entries of 2 rows"),
    (([image()] * 3, torch.zeros(3)), r"`batch\[0\]` has 3 entries of 3 rows"),
    ({"views": [{"x": torch.zeros(8, 2)}, {"x": torch.zeros(8, 2)}]}, r"`batch\['views'\]` has 8 or 2"),
    ((alike(8), alike(8)), r"`batch\[0\]` has 3 or 8"),
    ({"a": alike(2, 8), "b": alike(2, 4)}, r"`batch\['a'\]` has 8 or 2"),
    # columns of texts, as the default collate function makes them, or rows; one column, or one sample of several
    ([("a", "b", "c"), ("x", "y", "z")], "`batch` has 3 or 2"),
    ([("a", "b", "c")], "`batch` has 3 or 1"),
    ([["a", "b", "c"], None], "`batch` has 3 or 2"),
    ({"text": ["a", "b", "c"], "tag": ["x", "y"]}, r"`batch\['text'\]` has 3, `batch\['tag'\]` has 2"),
]


def test_two_readings_are_refused_and_named():
    for batch, readings in AMBIGUOUS:
        with pytest.raises(BatchSplitError, match=f"ambiguous: {readings}.* define `scatter_batch") as caught:
            count_samples(batch)
        assert len(str(caught.value)) < 600


def test_a_batch_without_samples_is_refused():
    for batch, batch_dim, message in [
        *((batch, 0, "no tensor with dimension 0") for batch in (torch.tensor(1.0), {"x": 3}, [], None)),
        (("a text", 3), 0, "`tuple` has no tensor"),
        ([rows(8), torch.zeros(8)], 2, "no tensor with dimension 2"),
        (torch.zeros(0, 3), 0, "the batch has no samples"),
    ]:
        with pytest.raises(BatchSplitError, match=message):
            split_batch(batch, lambda samples: [samples], batch_dim)


def test_sizes_and_dimensions_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"must add up to the 8 samples of the batch, got \[1, 2\]"):
        split_batch(rows(8), [1, 2])
    with pytest.raises(BatchSplitError, match=r"a tensor of shape \(8,\) has no dimension 1"):
        split_batch([torch.zeros(5, 8), torch.zeros(8)], [4, 4], batch_dim=1)


def test_chunks_are_views_along_the_batch_dimension():
    sequences = {"sequence": torch.zeros(7, 5, 3), "labels": torch.zeros(7, 5), "scale": torch.tensor(2.0)}
    assert count_samples(sequences, batch_dim=1) == 5
    empty, first, second = split_batch(sequences, [0, 2, 3], batch_dim=1)
    assert empty is None
    assert first["sequence"].shape == (7, 2, 3)
    assert first["sequence"].data_ptr() == sequences["sequence"].data_ptr()
    assert second["labels"].shape == (7, 3)
    assert second["scale"] is sequences["scale"]


def test_entries_of_several_kinds_are_columns_and_samples_of_one_kind_are_cut_one_by_one():
    texts = ["a", "b", "c"]
    for other in (0.5, "train"):
        assert split_batch((texts, other), [1, 2]) == [(["a"], other), (["b", "c"], other)]
    assert split_batch((texts, {"ids": [1, 2, 3]}), [1, 2]) == [(["a"], {"ids": [1]}), (["b", "c"], {"ids": [2, 3]})]
    first, _ = split_batch(([rows(3), rows(3)], torch.zeros(3)), [1, 2])
    assert [view.shape for view in first[0]] == [(1, 2), (1, 2)]  # two views of three samples
    for batch in ([1, 2.5, True], ["a", None, "b"], [["a"], ["b", "c"], []], [{"a": ["x"]}, {"a": ["y"]}, {"b": 1}]):
        assert split_batch(batch, [1, 2]) == [batch[:1], batch[1:]]


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor


@attrs.frozen
class Attrs:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Derived:
    x: Any
    shape: tuple = (2, 2, 2)
    later: Any = dataclasses.field(init=False)  # has no value yet


class Annotated(collections.UserDict):
    pass


class Tagged(list):
    def __init__(self, items, tag):
        super().__init__(items)
        self.tag = tag


def test_types_and_attributes_of_containers_are_kept():
    user, derived = Annotated(x=rows(2)), Derived(rows(2))
    user.ids, user.origin = [1, 2], "here"
    derived.__dict__["names"] = ["a", "b"]
    batch = [
        Slotted(rows(2)), Attrs(rows(2), list("ab")), derived, user, Pair(rows(2), rows(2)),
        collections.OrderedDict(x=rows(2)), collections.defaultdict(list, x=rows(2), size=torch.Size((2, 3))),
        types.MappingProxyType({"x": rows(2)}), Tagged([rows(2), torch.zeros(2)], "t"), numpy.zeros((2, 3)),
    ]  # fmt: skip
    assert count_samples(batch) == 2
    _, second = split_batch(batch, [1, 1])
    assert [type(part) for part in second] == [type(part) for part in batch]
    slotted, of_attrs, derived, user, pair, ordered, default, proxy, tagged, array = second
    for x in (slotted.x, of_attrs.x, derived.x, pair.left, tagged[0]):
        assert x.tolist() == [[2, 3]]
    for mapping in (user, ordered, default, proxy):
        assert mapping["x"].tolist() == [[2, 3]]
    assert (derived.names, derived.shape, of_attrs.y) == (["b"], (2, 2, 2), ["b"])
    assert not hasattr(derived, "later")
    assert (user.ids, user.origin) == ([2], "here")
    assert (default["size"], default["missing"]) == ((2, 3), [])
    assert tagged.tag == "t"
    assert array.shape == (1, 3)
    # The batch itself is untouched.
    assert all(len(part["x"]) == 2 for part in (batch[3], *batch[5:8]))
    assert (batch[2].names, batch[3].ids) == (["a", "b"], [1, 2])


def test_batches_of_huggingface_tokenizers_are_cut_with_their_encodings():
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1, "b": 2, "c": 3}, "[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    batch = tokenizer(["a", "b c", "c"], padding=True, return_tensors="pt")
    _, second = split_batch(batch, [1, 2])
    assert type(second) is type(batch)
    assert second.tokens(0) == ["b", "c"]
    assert second["input_ids"].tolist() == second.input_ids.tolist() == [[2, 3], [3, 0]]


class Opaque:
    """May hold samples, as a batch of graphs does."""


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_entries_that_cannot_be_cut_are_refused_by_name_and_cut_from_lists_with_one_for_each_sample():
    nested = torch.nested.nested_tensor([torch.ones(n, 3) for n in (2, 1, 4)], layout=torch.jagged)
    packed = pack_sequence([torch.zeros(n, 2) for n in (3, 2, 1)])
    others = [Opaque(), {1, 2, 3}, range(3), collections.deque("abc"), rows(3).to_sparse_csr(), rows(3).to_sparse()]
    for value in [*others, nested, packed]:
        with pytest.raises(BatchSplitError, match=r"`batch\['v'\]` of type `.*` cannot be cut.* define `scatter_batch"):
            count_samples({"v": value, "y": torch.zeros(3)})
        with pytest.raises(BatchSplitError, match=r"`batch` of type `.*` cannot be cut"):
            count_samples(value)
        with pytest.raises(BatchSplitError, match=r"`batch\['v'\]` has 2, `batch\['y'\]` has 3"):
            count_samples({"v": [value] * 2, "y": torch.zeros(3)})
        assert len(split_batch({"v": [value] * 3, "y": torch.zeros(3)}, [1, 2])[1]["v"]) == 2
    with pytest.raises(BatchSplitError, match=r"`batch\[0\]` of type `Opaque`"):
        count_samples([Opaque(), Opaque()])  # graphs, or batches of graphs?


def test_a_tuple_of_numbers_that_may_be_one_value_is_refused_when_it_is_as_long_as_the_batch():
    assert split_batch({"v": (1, 2, 3), "x": rows(4)}, [1, 3])[1]["v"] == (1, 2, 3)
    for other in (rows(3), [boxes(1), boxes(2), boxes(4)], ["a", "b", "c"]):
        with pytest.raises(BatchSplitError, match=r"`batch\['v'\]`, a tuple of numbers, has as many entries as the"):
            count_samples({"v": (1, 2, 3), "x": other})


def test_outputs_are_gathered():
    whole = rows(5)
    parts = [{"logits": whole[:2], "loss": torch.tensor(1.0)}, {"logits": whole[2:], "loss": torch.tensor(6.0)}]
    gathered = gather(parts, [2, 3], CPU)
    assert torch.equal(gathered["logits"], whole)
    assert gathered["loss"] == pytest.approx((2 * 1.0 + 3 * 6.0) / 5)
    for make in (Slotted, Attrs):
        assert torch.equal(gather([make(whole[:2]), make(whole[2:])], [2, 3], CPU).x, whole)
    assert gather([["a"], ["b", "c"]], [1, 2], CPU) == ["a", "b", "c"]
    assert gather([[{"n": 1}], [{"n": 2}, {"n": 3}]], [1, 2], CPU) == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert gather([None, None], [1, 2], CPU) is None
    for kind in (list, tuple):  # pairs of outputs, not lists of samples
        pairs = gather([kind([rows(2), torch.zeros(2)]), kind([rows(2), torch.ones(2)])], [2, 2], CPU)
        assert [tensor.shape for tensor in pairs] == [(4, 2), (4,)]
    matrices = gather([torch.zeros(3, 3), torch.ones(3, 3)], [1, 2], CPU)  # fits no rule: one entry per replica
    assert isinstance(matrices, list)
    assert matrices[1].tolist() == [[1.0] * 3] * 3


def test_samples_are_joined_and_common_values_stay():
    parts = [
        {"x": torch.full((3, size), float(size)), "name": "a", "scale": torch.tensor(torch.nan), "table": torch.ones(3)}
        for size in (2, 5)
    ]
    joined = join_batches(parts, batch_dim=1)
    assert joined["x"].tolist() == [[2.0] * 2 + [5.0] * 5] * 3
    assert (joined["name"], joined["table"].tolist()) == ("a", [1, 1, 1])
    parts = [{"boxes": [torch.ones(n, 4) for n in (3, 1, 4)[:size]], "ids": numpy.arange(size)} for size in (3, 2)]
    joined = join_batches(parts)
    assert [len(boxes) for boxes in joined["boxes"]] == [3, 1, 4, 3, 1]
    assert joined["ids"].tolist() == [0, 1, 2, 0, 1]
    assert join_batches([["a", "b"], ["c"]]) == ["a", "b", "c"]


def test_parts_that_do_not_fit_are_refused():
    for parts, message in (
        ([torch.ones(2, 3), torch.ones(2, 4)], r"`batch` cannot be joined, it is shape \(2, 3\) and shape \(2, 4\)"),
        ([(torch.ones(2), 0.5), (torch.ones(2), 0.7)], r"`batch\[1\]` cannot be joined, it is 0.5 and 0.7"),
        ([{"x": torch.ones(2)}, {"y": torch.ones(2)}], "`batch` cannot be joined"),
        ([{"x": torch.ones(2), "t": torch.ones(5, 0)}] * 2, "the batch size is ambiguous"),
        # Names of four classes, which look like names of four samples.
        ([{"x": torch.ones(2), "classes": ["a", "b", "c", "d"]}] * 2, "cut in another way"),
    ):
        with pytest.raises(BatchSplitError, match=message):
            join_batches(parts)


def test_outputs_are_joined_along_a_later_dimension_if_it_alone_has_the_sizes_of_the_chunks():
    draws = [torch.rand(1, size, 4) for size in (3, 2)]
    assert torch.equal(gather(draws, [3, 2], CPU), torch.cat(draws, 1))
    for shapes in [(1, 3), (2, 2)], [(3, 7), (2, 9)]:  # the second one is padded to the longest sample of each chunk
        assert isinstance(gather([torch.rand(shape) for shape in shapes], [3, 2], CPU), list)

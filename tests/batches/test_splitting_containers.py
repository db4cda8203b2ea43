"""What batches are made of in other people's code."""

import collections
import dataclasses
from collections.abc import MutableMapping
from typing import Any

import attrs
import numpy
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from lightning_ddp_ext.batches.containers import to_device
from lightning_ddp_ext.batches.splitting import batch_size_of, gather, split_batch
from lightning_ddp_ext.errors import BatchSplitError

CPU = torch.device("cpu")


def rows(n, width=2):
    return torch.arange(n * width).reshape(n, width)


@attrs.frozen
class Pair:
    x: Any
    y: Any = None


@dataclasses.dataclass
class Derived:
    x: Any
    total: Any = dataclasses.field(init=False)
    later: Any = dataclasses.field(init=False)

    def __post_init__(self):
        self.total = self.x.sum(1)


def test_attrs_classes_are_cut_and_gathered():
    batch = {"pair": Pair(rows(3), list("abc")), "x": rows(3)}
    first, second = split_batch(batch, [1, 2])
    assert isinstance(first["pair"], Pair)
    assert first["pair"].y == ["a"]
    assert torch.equal(second["pair"].x, rows(3)[1:])
    assert second["pair"].y == ["b", "c"]
    assert torch.equal(gather([first["pair"], second["pair"]], [1, 2], CPU).x, rows(3))


def test_fields_outside_of_the_constructor_and_attributes_beside_fields_are_cut():
    batch = Derived(rows(3))  # `later` has no value yet
    batch.names = ["a", "b", "c"]
    _, second = split_batch(batch, [1, 2])
    assert second.total.tolist() == [5, 9]
    assert second.names == ["b", "c"]
    assert not hasattr(second, "later")
    assert batch.names == ["a", "b", "c"]


def test_attributes_of_a_mapping_are_cut_with_it():
    class Annotated(collections.UserDict):
        pass

    batch = Annotated(x=rows(3))
    batch.ids, batch.origin = [1, 2, 3], "here"
    _, second = split_batch(batch, [1, 2])
    assert second.ids == [2, 3]
    assert second.origin == "here"
    assert batch.ids == [1, 2, 3]


def test_encodings_of_a_tokenizer_stay_with_their_samples():
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1, "b": 2, "c": 3}, "[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    batch = tokenizer(["a", "b c", "c"], padding=True, return_tensors="pt")
    _, second = split_batch(batch, [1, 2])
    assert second.tokens(0) == ["b", "c"]
    assert second["input_ids"].tolist() == [[2, 3], [3, 0]]


def test_a_mapping_with_storage_of_its_own_is_not_changed():
    class Stored(MutableMapping):
        def __init__(self, **items):
            self.stored = items

        def __getitem__(self, key):
            return self.stored[key]

        def __setitem__(self, key, value):
            self.stored[key] = value

        def __delitem__(self, key):
            del self.stored[key]

        def __iter__(self):
            return iter(self.stored)

        def __len__(self):
            return len(self.stored)

    batch = Stored(x=rows(3))
    first, second = split_batch(batch, [1, 2])
    assert [len(part["x"]) for part in (first, second, batch)] == [1, 2, 3]


def test_subclasses_of_lists_keep_their_attributes():
    class Tagged(list):
        def __init__(self, items, tag):
            super().__init__(items)
            self.tag = tag

    second = split_batch(Tagged([rows(3), torch.zeros(3)], "t"), [1, 2])[1]
    assert second.tag == "t"
    assert second[0].shape == (2, 2)


def test_packed_sequences_are_cut_into_sequences():
    lengths = [2, 3, 1, 4]
    packed = pack_sequence([torch.full((n, 2), float(n)) for n in lengths], enforce_sorted=False)
    batch = (packed, torch.tensor(lengths))
    assert batch_size_of(batch) == 4
    first, second = split_batch(batch, [1, 3])
    assert [len(sequence) for sequence in unpack_sequence(first[0])] == [2]
    assert [sequence[0, 0].item() for sequence in unpack_sequence(second[0])] == second[1].tolist() == [3, 1, 4]
    assert isinstance(to_device(packed, CPU), type(packed))


def test_packed_sequences_in_order_of_length_stay_so():
    packed = pack_sequence([torch.zeros(n, 2) for n in (3, 2, 1)])
    assert split_batch(packed, [1, 2])[1].sorted_indices is None


def test_sparse_and_nested_tensors_are_cut():
    nested = torch.nested.nested_tensor([torch.ones(n, 3) for n in (2, 1, 4)], layout=torch.jagged)
    batch = {"sparse": rows(3).to_sparse(), "nested": nested, "y": torch.zeros(3)}
    _, second = split_batch(batch, [1, 2])
    assert torch.equal(second["sparse"].to_dense(), rows(3)[1:])
    assert [len(part) for part in second["nested"].unbind()] == [1, 4]


class Slots:
    __slots__ = ("x",)

    def __init__(self):
        self.x = rows(3)


class Holder:
    def __init__(self, value):
        self.value = value


class Graphs:
    """Like the batches of torch_geometric: tensors sit in a store, and attributes are looked up there."""

    num_graphs = 3

    def __init__(self):
        self.__dict__["_store"] = {"x": rows(6), "edge_index": torch.zeros(2, 9)}

    def __getattr__(self, name):
        if name in self.__dict__["_store"]:
            return self._store[name]
        raise AttributeError(name)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize(
    "make",
    [
        Slots,
        lambda: Holder([rows(3)]),
        lambda: Holder(numpy.zeros((3, 2))),
        Graphs,
        lambda: {torch.zeros(3)},
        lambda: collections.deque([rows(3)]),
        lambda: rows(3).to_sparse_csr(),
    ],
)
def test_what_holds_arrays_and_cannot_be_cut_is_refused_by_its_name(make):
    with pytest.raises(BatchSplitError, match=r"`batch\['v'\]` of type `.*` holds tensors .* define `scatter_batch"):
        batch_size_of({"v": make(), "y": torch.zeros(3)})
    with pytest.raises(BatchSplitError, match=r"`batch` of type `.*` holds tensors but cannot be cut"):
        batch_size_of(make())


def test_a_list_of_such_objects_is_cut_where_the_batch_says_how_many_samples_there_are():
    batch = {"graphs": [Graphs() for _ in range(3)], "y": torch.zeros(3)}
    assert split_batch(batch, [1, 2])[1]["graphs"] == batch["graphs"][1:]
    with pytest.raises(BatchSplitError, match=r"`batch\[0\]` of type `Graphs`"):
        batch_size_of(batch["graphs"])  # graphs, or batches of graphs?


@pytest.mark.parametrize("value", [(1, 2, 3), range(3), collections.deque("abc")])
def test_sequences_that_may_be_one_value_are_refused_when_they_are_as_long_as_the_batch(value):
    assert split_batch({"v": value, "x": rows(4)}, [1, 3])[1]["v"] == value
    with pytest.raises(BatchSplitError, match=r"`batch\['v'\]`, a .*, has as many entries as the batch has samples"):
        batch_size_of({"v": value, "x": rows(3)})


def test_nothing_is_left_as_it_is():
    batch = {"x": rows(3), "none": None, "deep": [None, {"a": None}], "empty": [{}, []], "flag": True}
    _, second = split_batch(batch, [1, 2])
    assert {**second, "x": None} == {**batch, "x": None}


COLLATORS = ["DataCollatorWithPadding", "DataCollatorForTokenClassification", "DataCollatorForSeq2Seq"]


@pytest.mark.parametrize("name", COLLATORS)
def test_batches_of_huggingface_collators_are_cut(name):
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1}, "[PAD]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    whole_labels = name == "DataCollatorWithPadding"
    samples = [{"input_ids": [1] * n, "labels": n if whole_labels else [1] * n} for n in (1, 3, 2)]
    batch = getattr(transformers, name)(tokenizer)(samples)
    _, second = split_batch(batch, [1, 2])
    assert type(second) is type(batch)
    assert all(torch.equal(second[key], batch[key][1:]) for key in batch)

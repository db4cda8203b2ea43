"""Values as bytes: what comes out is what went in, and reading them runs no code."""

import collections
import enum
import io
import os
import sys
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from pickle import UnpicklingError
from typing import Any, NamedTuple

import attrs
import numpy
import pytest
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pack_sequence

from lightning_ddp_ext.distributed.exchange import (
    broadcast_bytes,
    broadcast_object,
    gather_known,
    gather_objects,
    scatter_objects,
)
from lightning_ddp_ext.distributed.serialization import _Call, _rebuild, name_skipped, pack, unpack
from lightning_ddp_ext.errors import OtherRankError
from lightning_ddp_ext.reducer.buckets import divide_into_buckets, send_all
from tests.support.fake_group import run_ranks
from tests.support.processes import run_processes


class Kind(enum.Enum):
    IMAGE = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    label: int
    kinds: list[Kind] = field(default_factory=list)


@attrs.define
class Record:
    value: Any


class Encoding(UserDict):
    def __init__(self, items: dict[str, Any], tokenizer: str) -> None:
        super().__init__(items)
        self.tokenizer = tokenizer


class Opaque:
    """An object that cannot be sent."""


def sendable() -> dict[str, Any]:
    """One of everything that can be sent."""
    return {
        "plain": [None, True, -3, 2.5, float("inf"), "text \N{SNOWMAN}", b"\x00\xff", 1 + 2j, 2**70],
        "tensors": (
            torch.arange(6.0).reshape(2, 3), torch.tensor(3, dtype=torch.int8), torch.tensor([True, False]),
            torch.empty(0, 4), torch.tensor([1 + 1j]), torch.tensor(1.5, dtype=torch.bfloat16),
            torch.arange(6).reshape(2, 3).T, torch.nn.Parameter(torch.ones(2)), torch.tensor([1 + 1j]).conj(),
        ),
        "arrays": [
            numpy.arange(3, dtype=numpy.float32), numpy.float32(0.5), numpy.float64(0.1), numpy.int64(7), numpy.True_,
        ],
        "queue": collections.deque([1, Point(2, torch.ones(1))], maxlen=3),
        "default": collections.defaultdict(list, a=[1]),
        "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
        "point": Point(torch.ones(2), {"y": 1}),
        "sample": Sample(torch.zeros(3), 4, [Kind.IMAGE]),
        "record": Record(Point(1, 2)),
        "ordered": OrderedDict([("b", 1), ("a", torch.ones(1))]),
        "counter": collections.Counter({3: 2}),
        "encoding": Encoding({"ids": torch.arange(3)}, "bpe"),
        "sets": [{1, 2}, frozenset("ab")],
        "sequence": pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]),
        (1, "key"): "a key that is no text",
        Kind.IMAGE: "a key that is a member of an enumeration",
    }  # fmt: skip


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and numpy.array_equal(one, other)
    if type(one) is not type(other) or getattr(one, "default_factory", 0) is not getattr(other, "default_factory", 0):
        return False
    if isinstance(one, collections.deque):
        return one.maxlen == other.maxlen and same([*one], [*other])
    if isinstance(one, dict | Encoding):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Sample):
        return same(vars(one), vars(other))
    if isinstance(one, Record):
        return same(one.value, other.value)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_value_is_the_same_after_it_was_sent():
    for key, value in sendable().items():
        packed = pack(value)
        received, skipped = unpack(packed.data)
        assert not packed.skipped, key
        assert not skipped, key
        assert same(value, received), key
    for one, other in (  # the comparison can fail
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        ([1], (1,)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Sample(torch.ones(1), 1), Sample(torch.zeros(1), 1)),
    ):
        assert not same(one, other)


def test_sparse_tensors_and_attributes_beside_items_are_sent_and_views_without_the_rest_of_their_storage():
    assert unpack(pack(Encoding({"ids": 1}, "bpe")).data)[0].tokenizer == "bpe"
    assert torch.equal(unpack(pack(torch.eye(2).to_sparse()).data)[0].to_dense(), torch.eye(2))
    bits = torch.ones(2)
    assert same([bits, bits.view(torch.int32)], unpack(pack([bits, bits.view(torch.int32)]).data)[0])
    assert pack(torch.zeros(10**6)[:1]).data.numel() < 10**4


def make_local():
    class Local(dict):
        pass

    return Local(a=1)


def test_objects_that_cannot_be_sent_are_skipped_named_and_can_be_filled_in():
    for value, place in (
        (Opaque(), ""),
        ([0, Opaque()], "[1]"),
        ({"a": Sample(Opaque(), 1)}, "['a'].image"),
        ({"a": lambda: 0}, "['a']"),
        (torch.empty(2, device="meta"), ""),
        (numpy.array(["text"]), ""),
        (make_local(), ""),
        (Flags.A | Flags.B, ""),
        (numpy.longdouble(1), ""),
        (numpy.ones(1, numpy.longdouble), ""),
        (collections.defaultdict(lambda: 0), ".default_factory"),
    ):
        packed = pack(value)
        assert list(packed.skipped) == [place]
        names = unpack(packed.data)[1]
        assert name_skipped(names) == name_skipped(packed.skipped)
        assert name_skipped(names).endswith(f" at `{place}`" if place else "`"), value
    data = pack({"a": [Opaque()], "b": 1}).data
    assert unpack(data)[0] == {"a": [None], "b": 1}
    assert unpack(data, {"['a'][0]": 5})[0] == {"a": [5], "b": 1}


class Hostile:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def test_data_that_asks_for_anything_else_is_refused():
    for value in (
        Hostile(os.system, "exit 1"),
        Hostile(eval, "1"),
        Opaque(),
        _Call(_rebuild, "subprocess:Popen", ["id"], [], ["args"]),
        _Call(_rebuild, "os:system", ["id"], [], []),
        _Call(_rebuild, "antigravity:Joke", [], [], []),
        _Call(_rebuild, "lightning_ddp_ext.distributed.exchange:dist.Store", [], [], []),
        _Call(_rebuild, f"{__name__}:Opaque", [], [], []),
    ):
        file = io.BytesIO()
        torch.save((value, {}), file)
        with pytest.raises((ValueError, UnpicklingError)):
            unpack(torch.frombuffer(file.getbuffer(), dtype=torch.uint8))
    assert "antigravity" not in sys.modules


def exchange_and_scatter():
    """Receive from rank 1 of three and gather from all; scatter from one rank. After errors, ranks still agree."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    value = {**sendable(), "opaque": Opaque(), "inner": [Opaque()]} if rank == 1 else None
    data = broadcast_bytes(pack(value).data if rank == 1 else None, dist.group.WORLD, 1)
    exchanged = *unpack(data), broadcast_object((rank, "b"), None, 1), gather_objects({rank: rank * "long "})
    return exchanged, scatter_several(rank)


@pytest.fixture(scope="module")
def exchanged():
    """What each rank has received, and what was scattered to it."""
    return run_processes(exchange_and_scatter, 3, timeout=180)


def test_ranks_receive_a_value(exchanged):
    for (received, skipped, broadcast, gathered), _ in exchanged:
        assert skipped == {"['opaque']": "Opaque", "['inner'][0]": "Opaque"}
        assert name_skipped(skipped) == "`Opaque` at `['opaque']` and 1 more"
        assert same({**sendable(), "opaque": None, "inner": [None]}, received)
        assert broadcast == (1, "b")
        assert gathered == [{0: ""}, {1: "long "}, {2: "long long "}]


def test_numbers_are_known_if_every_rank_knows_its_own():
    found = run_ranks(2, lambda group: gather_known([group.rank, None if group.rank else 5, 0], group))
    assert found == [[[0, 1], None, [0, 0]]] * 2


def test_an_object_that_ranks_cannot_exchange_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(TypeError, match=r"`Opaque` at `\[0\]` cannot be sent"):
        gather_objects([Opaque()])


def scatter(rank, objects, source=0):
    try:
        return scatter_objects(objects if rank == source else None, source)
    except (ValueError, TypeError, OtherRankError) as error:
        return f"{type(error).__name__}: {error}"


def scatter_several(rank):
    ragged = [{"rows": torch.ones(size)} for size in (0, 3, 1000)]
    pair = dist.new_group([0, 2])
    within = scatter_objects(["a", "b"] if rank == 2 else None, 1, pair) if rank != 1 else None
    return [
        scatter(rank, ragged, source=2),
        scatter(rank, [1, 2]),
        scatter(rank, [1, Opaque(), 3]),
        scatter(rank, None, source=1),
        scatter(rank, [], source=3),
        scatter(rank, ("x", None, 2.5)),
        within,
    ]


def test_each_rank_gets_its_object_or_every_rank_an_error(exchanged):
    for rank, (_, (found, *errors, last, within)) in enumerate(exchanged):
        assert len(found["rows"]) == (0, 3, 1000)[rank]
        wrong, opaque, nothing, source = errors
        assert wrong.startswith(
            "ValueError" if rank == 0 else "OtherRankError: rank 0 of the group scatters no objects"
        )
        assert "`objects` must be a sequence of 3 objects, one for each rank, got 2." in wrong
        assert "`Opaque` cannot be sent to another rank" in opaque
        assert "got a NoneType" in nothing
        assert nothing.startswith("ValueError" if rank == 1 else "OtherRankError: rank 1")
        assert source == "ValueError: `source` must be a rank of the group, from 0 to 2, got 3."
        assert last == ("x", None, 2.5)[rank]
        assert within == ("a", None, "b")[rank]


def test_without_other_ranks_there_is_one_object():
    assert scatter_objects([{"a": 1}]) == {"a": 1}
    for objects, message in (([1, 2], "a sequence of 1 objects"), (None, "got a NoneType")):
        with pytest.raises(ValueError, match=message):
            scatter_objects(objects)


META = torch.device("meta")


def test_tensors_are_copied_in_order_with_shapes_and_types_unless_they_are_there():
    tensors = [torch.ones(2), torch.ones(3, 2, dtype=torch.float64), torch.ones(()), torch.ones(4, dtype=torch.int64)]
    there, *others = send_all(tensors, [torch.device("cpu"), META, META])
    assert all(sent is tensor for sent, tensor in zip(there, tensors, strict=True))
    assert len(others) == 2
    for sent in others:
        assert [(t.shape, t.dtype, t.device.type) for t in sent] == [(t.shape, t.dtype, "meta") for t in tensors]
        assert sent[0]._base is sent[2]._base is not None
    assert send_all([], [META]) == [[]]
    ((_, sparse),) = send_all([torch.ones(2), torch.eye(2).to_sparse()], [META])  # travels alone
    assert sparse.is_sparse
    assert sparse.device.type == "meta"


def test_buckets_are_filled_in_order_up_to_their_size():
    for limit, expected in ((1, [[0], [1], [2]]), (8, [[0, 1], [2]]), (100, [[0, 1, 2]])):
        assert divide_into_buckets([torch.ones(1)] * 3, range(3), limit) == expected

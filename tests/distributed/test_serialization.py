"""Values as text and tensors: what comes out is what went in, and reading them runs no code."""

import json
import sys

import numpy
import pytest
import torch

from lightning_ddp_ext.distributed.serialization import Packed, pack, unpack
from tests.distributed import packing_values as values
from tests.support.processes import run_processes


def through_text(packed):
    """As another rank gets it."""
    return Packed(json.loads(json.dumps(packed.form)), packed.tensors, {})


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and numpy.array_equal(one, other)
    if isinstance(one, numpy.generic):
        return one.item() == other
    if type(one) is not type(other) and not (isinstance(one, torch.Size) and type(other) is tuple):
        return False
    if isinstance(one, dict | values.Encoding):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, values.Sample):
        return same(vars(one), vars(other))
    if isinstance(one, values.Record):
        return same(one.value, other.value)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("key", values.describable(), ids=str)
def test_a_value_is_the_same_after_it_was_sent(key):
    value = values.describable()[key]
    packed = pack(value)
    assert not packed.left_out
    assert same(value, unpack(through_text(packed)))


def test_the_comparison_can_fail():
    assert not same(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not same([1], (1,))
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same(values.Sample(torch.ones(1), 1), values.Sample(torch.zeros(1), 1))


def test_attributes_beside_the_items_are_kept():
    assert unpack(through_text(pack(values.Encoding({"ids": 1}, "bpe")))).tokenizer == "bpe"


class InAFunction:
    @staticmethod
    def make():
        class Local(dict):
            pass

        return Local(a=1)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (values.Opaque(), ""),
        ([0, values.Opaque()], "[1]"),
        ({"a": values.Sample(values.Opaque(), 1)}, "['a'].image"),
        ({"a": lambda: 0}, "['a']"),
        (torch.eye(2).to_sparse(), ""),
        (torch.empty(2, device="meta"), ""),
        (numpy.array(["text"]), ""),
        (InAFunction.make(), ""),
        ([values.Opaque], "[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_described_is_left_out_and_named(value, place):
    packed = pack(value)
    assert list(packed.left_out) == [place]
    assert f"at `{place}`" in packed.name_left_out() if place else "at" not in packed.name_left_out().split("`")[2]
    json.dumps(packed.form)


def test_places_can_be_filled_in():
    packed = pack({"a": [values.Opaque()], "b": 1})
    assert unpack(through_text(packed)) == {"a": [None], "b": 1}
    assert unpack(through_text(packed), {"['a'][0]": 5}) == {"a": [5], "b": 1}


HOSTILE = [
    ["object", "subprocess:Popen", {"args": "id"}],
    ["object", "os:system", {}],
    ["list", "subprocess:Popen", []],
    ["mapping", "builtins:object", [], {}],
    ["record", "builtins:list", []],
    ["enum", "builtins:int", "real"],
    ["object", "antigravity:Joke", {}],
    ["object", "lightning_ddp_ext.distributed.serialization:dist.Store", {}],
    ["call", "os:system", ["id"]],
]


@pytest.mark.parametrize("form", HOSTILE, ids=lambda form: f"{form[0]} {form[1]}")
def test_a_form_that_asks_for_anything_else_is_refused(form):
    with pytest.raises((ValueError, TypeError)):
        unpack(Packed(form, [], {}))
    assert "antigravity" not in sys.modules


def test_ranks_receive_a_value():
    by_rank = run_processes(values.exchange, 2, timeout=180)
    expected = values.describable()
    for received, filled, left_out, named in by_rank:
        assert left_out == {"['opaque']": "Opaque", "['inner'][0]": "Opaque"}
        assert named == ["`Opaque` at `['opaque']` and 1 more"]
        assert filled == ("filled in", [None])
        assert same(expected, received)

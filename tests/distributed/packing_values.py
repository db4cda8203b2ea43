"""Values that ranks send each other; in a module of their own, since classes are looked up by their place."""

import collections
import enum
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import attrs
import numpy
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pack_sequence

from lightning_ddp_ext.distributed.serialization import broadcast_packed, pack, unpack


class Kind(enum.Enum):
    IMAGE = 1


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


class Ragged(list):
    pass


class Opaque:
    """What cannot be described."""


def describable() -> dict[str, Any]:
    """One of everything that can be sent."""
    return {
        "plain": [None, True, -3, 2.5, float("inf"), "text \N{SNOWMAN}", b"\x00\xff", 1 + 2j, 2**70],
        "tensors": (
            torch.arange(6.0).reshape(2, 3), torch.tensor(3, dtype=torch.int8), torch.tensor([True, False]),
            torch.empty(0, 4), torch.tensor([1 + 1j]), torch.tensor(1.5, dtype=torch.bfloat16),
            torch.arange(6).reshape(2, 3).T,
        ),
        "arrays": [numpy.arange(3, dtype=numpy.float32), numpy.float32(0.5), numpy.int64(7)],
        "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
        "point": Point(torch.ones(2), {"y": 1}),
        "sample": Sample(torch.zeros(3), 4, [Kind.IMAGE]),
        "record": Record(Point(1, 2)),
        "ordered": OrderedDict([("b", 1), ("a", torch.ones(1))]),
        "counter": collections.Counter({3: 2}),
        "encoding": Encoding({"ids": torch.arange(3)}, "bpe"),
        "ragged": Ragged([torch.ones(1), torch.ones(2)]),
        "sets": [{1, 2}, frozenset("ab")],
        "sequence": pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]),
        (1, "key"): "a key that is no text",
    }  # fmt: skip


def exchange() -> tuple[Any, Any, dict[str, Any], list[str]]:
    """Receive from rank 1 of two; returns what came, what was left out, and a part that was filled in."""
    dist.init_process_group("gloo")
    value = {**describable(), "opaque": Opaque(), "inner": [Opaque()]} if dist.get_rank() == 1 else None
    packed = broadcast_packed(pack(value), dist.group.WORLD, 1)
    received = unpack(packed, {"['opaque']": "filled in"})
    left_out = {
        place: kind if isinstance(kind, str) else type(kind).__name__ for place, kind in packed.left_out.items()
    }
    opaque, inner = received.pop("opaque"), received.pop("inner")
    return received, (opaque, inner), left_out, [packed.name_left_out()]

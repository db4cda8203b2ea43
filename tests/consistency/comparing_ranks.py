"""What the ranks of the tests of comparisons run; one launch goes through tables of cases."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.consistency.replica_differences import ReplicaDifference, find_difference
from lightning_ddp_ext.distributed.exchange import exchange_device, gather_integer, gather_objects
from tests.consistency.comparing_setups import compare_all_setups

Tensors = dict[str, Tensor]


def base() -> Tensors:
    return {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.zeros(4, dtype=torch.bfloat16),
        "c": torch.tensor(7),
        "d": torch.eye(3).to_sparse(),
        "e": torch.tensor([True, False]),
        "f": torch.tensor([1 + 2j, 3.0], dtype=torch.complex64),
    }


def flip_last_bit(tensors: Tensors) -> None:
    tensors["a"].view(torch.int32)[1, 1] ^= 1


def negate_zero(tensors: Tensors) -> None:
    tensors["b"][2] = -0.0


def write_nan(tensors: Tensors) -> None:
    tensors["a"][0, 2] = float("nan")


def write_other_nan(tensors: Tensors) -> None:
    tensors["a"].view(torch.int32)[0, 2] = 0x7FC00001


def count_one_more(tensors: Tensors) -> None:
    tensors["c"] += 1


def change_sparse(tensors: Tensors) -> None:
    tensors["d"] = (2 * torch.eye(3)).to_sparse()


def flip_bool(tensors: Tensors) -> None:
    tensors["e"].logical_not_()


def change_complex(tensors: Tensors) -> None:
    tensors["f"][1] = 3 + 1j


def drop(tensors: Tensors) -> None:
    del tensors["b"]


def drop_all(tensors: Tensors) -> None:
    tensors.clear()


def add_another(tensors: Tensors) -> None:
    tensors["g"] = torch.ones(2)


def reshape(tensors: Tensors) -> None:
    tensors["a"] = tensors["a"].view(3, 2)


def convert(tensors: Tensors) -> None:
    tensors["a"] = tensors["a"].double()


def reorder(tensors: Tensors) -> None:
    tensors["a"] = tensors.pop("a")


def change_two(tensors: Tensors) -> None:
    count_one_more(tensors)
    tensors["a"] += 1


def nothing(tensors: Tensors) -> None:
    pass


CHANGES: list[Callable[[Tensors], None]] = [
    nothing, flip_last_bit, negate_zero, write_nan, write_other_nan, count_one_more, change_sparse, flip_bool,
    change_complex, drop, drop_all, add_another, reshape, convert, reorder, change_two,
]  # fmt: skip


def find_differences(changed_rank: int) -> dict[str, ReplicaDifference | None]:
    """Change something on one rank, case by case, and return what is found."""
    found: dict[str, ReplicaDifference | None] = {}
    for change in CHANGES:
        tensors = base()
        if change is write_other_nan:
            write_nan(tensors)
        if dist.get_rank() == changed_rank:
            change(tensors)
        found[change.__name__] = find_difference(tensors)
    return found


def count_collectives() -> tuple[dict[str, int], dict[str, int]]:
    """Count the collectives of a comparison of equal tensors, and of different ones."""
    counted = []
    for different in (False, True):
        tensors = {str(i): torch.ones(10) for i in range(100)}
        if different and dist.get_rank() == 1:
            tensors["50"][0] = 2
        counts: dict[str, int] = {}
        with _counting(counts):
            find_difference(tensors)
        counted.append(counts)
    return counted[0], counted[1]


class _counting:
    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts
        self.originals: dict[str, Any] = {}

    def __enter__(self) -> None:
        for name in ("all_gather", "all_gather_object", "broadcast", "all_reduce"):
            self.originals[name] = getattr(dist, name)
            setattr(dist, name, self.wrap(name))

    def wrap(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] = self.counts.get(name, 0) + 1
            return self.originals[name](*args, **kwargs)

        return call

    def __exit__(self, *_: object) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)


def compare_everything(changed_rank: int) -> "Compared":
    """Go through all tables; one rank has what the others do not have."""
    dist.init_process_group("gloo")
    compared = Compared(
        differences=find_differences(changed_rank),
        setups=compare_all_setups(changed_rank),
        collectives=count_collectives(),
        subgroup=compare_in_subgroups() if dist.get_world_size() == 3 else None,
    )
    dist.destroy_process_group()
    return compared


def compare_in_subgroups() -> tuple[str, list[int], list[int], str]:
    """Compare ranks 1 and 2 of three, of which rank 2 differs; rank 0 takes no part."""
    group = dist.new_group([1, 2])
    rank = dist.get_rank()
    found, integers, objects = "", [], []
    if rank > 0:
        difference = find_difference({"a": torch.full((2,), float(rank))}, group)
        found = str(difference)
        integers = gather_integer(-(2**63) + rank, group)
        objects = gather_objects(10 * rank, group)
    device = str(exchange_device(None))
    return found, integers, objects, device


@dataclass
class Compared:
    """What came of all comparisons on one rank."""

    differences: dict[str, ReplicaDifference | None]
    setups: dict[str, str | None]
    collectives: tuple[dict[str, int], dict[str, int]]
    subgroup: tuple[str, list[int], list[int], str] | None

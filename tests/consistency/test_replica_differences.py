"""A tensor that differs on one rank is found, named and measured, and nothing else is."""

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext.consistency import find_difference
from lightning_ddp_ext.distributed.exchange import exchange_device, gather_integer, gather_objects


def base():
    return {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.zeros(4, dtype=torch.bfloat16),
        "c": torch.tensor(7),
        "d": torch.eye(3).to_sparse(),
        "e": torch.tensor([True, False]),
        "f": torch.tensor([1 + 2j, 3.0], dtype=torch.complex64),
        "g": torch.tensor(0.1, dtype=torch.float64),
        "h": torch.tensor([200, 0], dtype=torch.uint8),
        "i": torch.tensor([[60000.0, 1000.0], [4.0, 0.0]], dtype=torch.float16),
        "j": torch.tensor([0.0, float("inf")]),
    }


def write_bits(tensors, bits):
    tensors["a"].view(torch.int32)[0, 2] = bits


# A change on one rank: the tensor, and the message, of which {} stands for the ranks.
VALUES = {
    "a bit": (lambda tensors: tensors["a"].view(torch.int32)[1, 1].bitwise_xor_(1), "a, float32 [2, 3]", "4.77e-07"),
    "the sign of zero": (lambda tensors: tensors["b"][2].neg_(), "b, bfloat16 [4]", "0"),
    "nan": (lambda tensors: write_bits(tensors, 0x7FC00000), "a, float32 [2, 3]", "nan"),
    "another nan": (lambda tensors: write_bits(tensors, 0x7FC00001), "a, float32 [2, 3]", "0"),
    "an integer": (lambda tensors: tensors["c"].add_(1), "c, int64 []", "1"),
    "a sparse tensor": (
        lambda tensors: tensors.update(d=(2 * torch.eye(3)).to_sparse()), "d, float32 sparse_coo [3, 3]", "1"
    ),
    "a double with all digits": (
        lambda tensors: tensors["g"].copy_(torch.nextafter(tensors["g"], torch.ones_like(tensors["g"]))),
        "g, float64 []", "1.39e-17",
    ),
    "a small type without overflow": (lambda tensors: tensors["h"].add_(1), "h, uint8 [2]", "1"),
    "several elements, of which others are equal": (
        lambda tensors: tensors["i"][1].sub_(1), "i, float16 [2, 2]", "1"
    ),
    "infinity": (lambda tensors: tensors["i"][1, 1].fill_(float("inf")), "i, float16 [2, 2]", "inf"),
    "another element than infinity": (lambda tensors: tensors["j"][0].add_(2), "j, float32 [2]", "2"),
    "a complex number": (lambda tensors: tensors["f"][1].fill_(3 + 1j), "f, complex64 [2]", "1"),
}  # fmt: skip
CHANGES = {
    name: (change, f"{tensor}, of {{}} by up to {largest} (1 of 10 tensors differ)")
    for name, (change, tensor, largest) in VALUES.items()
} | {
    "two tensors": (
        lambda tensors: (tensors["c"].add_(1), tensors["a"].add_(1)),
        "a, float32 [2, 3], of {} by up to 1 (2 of 10 tensors differ)",
    )
}
# A change of names, shapes or dtypes; the first {} stands for the odd rank, the second for the others.
FORMS = {
    "missing": (lambda tensors: tensors.pop("b"), "b is missing on {}, but bfloat16 [4] on {} (1 of 10"),
    "all missing": (lambda tensors: tensors.clear(), "a is missing on {}, but float32 [2, 3] on {} (10 of 10"),
    "one more": (
        lambda tensors: tensors.update(z=torch.ones(2)), "z is float32 [2] on {}, but missing on {} (1 of 11"
    ),
    "shape": (
        lambda tensors: tensors.update(a=tensors["a"].view(3, 2)),
        "a is float32 [3, 2] on {}, but float32 [2, 3] on {} (1 of 10",
    ),
    "dtype": (
        lambda tensors: tensors.update(a=tensors["a"].double()),
        "a is float64 [2, 3] on {}, but float32 [2, 3] on {} (1 of 10",
    ),
}  # fmt: skip
EQUAL = {"nothing": lambda tensors: None, "another order": lambda tensors: tensors.update(a=tensors.pop("a"))}


def find_all(odd_rank):
    """Return the difference that this rank finds after each change, and the collectives of two comparisons."""
    found = {}
    changes = {name: change for name, (change, _) in (CHANGES | FORMS).items()} | EQUAL
    for name, change in changes.items():
        tensors = base()
        if name == "another nan":
            write_bits(tensors, 0x7FC00000)
        if dist.get_rank() == odd_rank:
            change(tensors)
        difference = find_difference(tensors)
        found[name] = None if difference is None else difference.text
    collectives = [count_collectives(is_different) for is_different in (False, True)]
    return found, collectives, compare_subgroup() if dist.get_world_size() == 3 else None


def count_collectives(is_different):
    tensors = {str(number): torch.ones(10) for number in range(100)}
    tensors["50"] += is_different * dist.get_rank()
    counts = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_gather_object", "broadcast", "all_reduce"):
            original = getattr(dist, name)

            def call(*args, name=name, original=original, **kwargs):
                counts[name] = counts.get(name, 0) + 1
                return original(*args, **kwargs)

            patch.setattr(dist, name, call)
        find_difference(tensors)
    return counts


def compare_subgroup():
    """Compare ranks 1 and 2 of three."""
    group, rank = dist.new_group([1, 2]), dist.get_rank()
    if rank == 0:
        return None
    difference = find_difference({"a": torch.full((2,), float(rank))}, group)
    return (
        difference.text,
        gather_integer(-(2**63) + rank, group),
        gather_objects(10 * rank, group),
        exchange_device(None),
    )


def test_every_rank_names_the_tensor_the_ranks_and_the_difference(two, three):
    for results, odd, others in ((two, "rank 1", "rank 0"), (three, "rank 0", "ranks 1, 2")):
        expected = {name: message.format(f"{odd} differs from {others}") for name, (_, message) in CHANGES.items()}
        expected |= {name: f"{message.format(odd, others)} tensors differ)" for name, (_, message) in FORMS.items()}
        expected |= dict.fromkeys(EQUAL)
        for (found, _, _), _ in results:
            assert found == expected


def test_equal_tensors_cost_one_collective(two):
    for (_, (equal, different), _), _ in two:
        assert equal == {"all_gather": 1}
        assert different == {"all_gather": 3, "all_reduce": 2, "broadcast": 1}


def test_a_subgroup_is_compared(three):
    outside, *inside = (subgroup for (_, _, subgroup), _ in three)
    assert outside is None
    for found, integers, objects, device in inside:
        assert found.startswith("a, float32 [2], of rank 2 differs from rank 1 by up to 1 ")
        assert (integers, objects, device.type) == ([-(2**63) + 1, -(2**63) + 2], [10, 20], "cpu")

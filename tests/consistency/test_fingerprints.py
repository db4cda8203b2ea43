"""A fingerprint depends on every bit, on dtype and shape, and on nothing else."""

import itertools

import pytest
import torch
from torch import nn

from lightning_ddp_ext._compat.torch import _WORDS
from lightning_ddp_ext.consistency import describe, fingerprint, fingerprint_all

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
BLOCK = _WORDS
SIZES = [1, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5]


def random_bytes(size, seed=0):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def of_bits(bits):
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_has_a_fingerprint_that_depends_on_every_bit(dtype):
    size = 5 * dtype.itemsize
    data = random_bytes(size) % 2 if dtype == torch.bool else random_bytes(size)
    tensor = data.view(dtype)
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    found = {fingerprint(tensor)}
    bits = [0] if dtype == torch.bool else range(8)
    for position, bit in itertools.product(range(size), bits):
        changed = data.clone()
        changed[position] ^= 1 << bit
        found.add(fingerprint(changed.view(dtype)))
    assert len(found) == 1 + size * len(bits)


@pytest.mark.parametrize("size", SIZES)
def test_a_change_of_one_bit_is_seen_in_any_block(size):
    data = random_bytes(size)
    original = fingerprint(data)
    for position, bit in itertools.product({0, size // 2, size - 1}, range(8)):
        data[position] ^= 1 << bit
        assert fingerprint(data) != original
        data[position] ^= 1 << bit


def test_changes_of_several_signs_do_not_cancel():
    # The sign is a word's last bit: the products of odd multipliers with it are all the same.
    for zeros in (torch.zeros(12), torch.zeros(12, dtype=torch.float64)):
        signs = itertools.product([False, True], repeat=len(zeros))
        assert len({fingerprint(torch.where(torch.tensor(one), -zeros, zeros)) for one in signs}) == 2 ** len(zeros)


def test_swapped_elements_and_swapped_blocks_are_seen():
    data = random_bytes(3 * BLOCK)
    original = fingerprint(data)
    assert fingerprint(data.flip(0)) != original
    assert fingerprint(data.roll(8)) != original
    assert fingerprint(data.roll(BLOCK)) != original


def test_dtype_shape_the_sign_of_zero_and_the_bits_of_nan_are_part_of_a_fingerprint():
    zeros = [
        torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int32), torch.zeros(5),
        torch.zeros(()), torch.zeros(1), torch.zeros(0), torch.zeros(0, 3), torch.zeros(2, dtype=torch.float64),
    ]  # fmt: skip
    nans = [of_bits([bits]) for bits in (0x7FC00000, 0x7FC00001, 0xFFC00000)]
    assert all(nan.isnan().all() for nan in nans)
    values = [*zeros, -torch.zeros(1), *nans]
    assert len({fingerprint(value) for value in values}) == len(values)
    assert fingerprint(nans[0]) == fingerprint(of_bits([0x7FC00000]))


def test_strides_offsets_gradients_and_flags_are_no_part_of_a_fingerprint():
    tensor = torch.randn(6, 4, 5, 3)
    expected = fingerprint(tensor)
    assert fingerprint(tensor.to(memory_format=torch.channels_last)) == expected
    assert fingerprint(tensor.transpose(1, 2).contiguous().transpose(1, 2)) == expected
    assert fingerprint(nn.Parameter(tensor)) == expected
    for offset in range(1, 5):
        shifted = torch.empty(tensor.numel() + offset)[offset:].copy_(tensor.flatten()).view(tensor.shape)
        assert fingerprint(shifted) == expected
    assert fingerprint(torch.ones(1).expand(7)) == fingerprint(torch.ones(7))
    values = torch.randn(5, dtype=torch.complex64)
    assert fingerprint(values.conj()) == fingerprint(values.conj().resolve_conj()) != fingerprint(values)
    assert fingerprint(values.conj().imag) == fingerprint(-values.imag)


@pytest.mark.filterwarnings(
    "ignore:Sparse CS[RC] tensor support is in beta",
    "ignore:The PyTorch API of nested tensors",
    "ignore:Sparse invariant checks are implicitly disabled",  # torch before 2.13
)
def test_sparse_and_nested_tensors_have_fingerprints():
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    other = torch.tensor([[0.0, 1.0], [2.5, 0.0]])
    layouts = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]
    found = {fingerprint(tensor.to_sparse(layout=layout)) for tensor in (dense, other) for layout in layouts}
    assert len(found) == 2 * len(layouts)
    twice = torch.sparse_coo_tensor([[1, 0, 1], [0, 1, 0]], [1.0, 1.0, 1.0], check_invariants=True)
    assert fingerprint(twice) == fingerprint(dense.to_sparse())
    for layout in (torch.strided, torch.jagged):
        one = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        same = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        cut_otherwise = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=layout)
        assert fingerprint(one) == fingerprint(same) != fingerprint(cut_otherwise)


def test_a_fingerprint_is_the_same_in_every_version_of_the_program():
    # Ranks that run different versions would otherwise differ in everything.
    assert fingerprint(torch.arange(10)) == 5933465485182553318


def test_names_and_order_and_every_tensor_count():
    tensors = {f"tensor {i}": torch.full((i + 1,), float(i)) for i in range(50)}
    original = fingerprint_all(tensors)
    assert fingerprint_all({name: tensor.clone() for name, tensor in tensors.items()}) == original
    assert fingerprint_all(dict(reversed(tensors.items()))) != original
    assert fingerprint_all({f"{name}x": tensor for name, tensor in tensors.items()}) != original
    for name, tensor in tensors.items():
        assert fingerprint_all({**tensors, name: tensor + 1}) != original


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_are_described_by_dtype_and_shape():
    assert describe(torch.zeros(3, 4, dtype=torch.bfloat16)) == "bfloat16 [3, 4]"
    assert describe(torch.zeros(())) == "float32 []"
    assert describe(torch.eye(2).to_sparse()) == "float32 sparse_coo [2, 2]"
    assert describe(torch.nested.nested_tensor([torch.ones(2)])) == "float32 nested [1, ...]"
    assert describe(nn.LazyLinear(3).weight) == "float32, uninitialized"
    one, other = torch.empty(3, device="meta"), torch.empty(4, device="meta")  # no data: by their shape
    assert fingerprint(one) == fingerprint(torch.empty(3, device="meta")) != fingerprint(other)
    assert fingerprint(nn.LazyLinear(3).weight) == fingerprint(nn.LazyLinear(4).weight)

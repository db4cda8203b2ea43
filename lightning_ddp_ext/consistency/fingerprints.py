"""Fingerprints of tensors: 64 bits for comparing tensors bit by bit."""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

# A block has one word per multiplier: 256 KiB, so that a core's cache holds the blocks in use.
_WORDS = 1 << 15
_BYTES = 8 * _WORDS
# Blocks that are hashed at once: one fits a CPU's cache; other devices need more work per kernel launch.
_BLOCKS_AT_ONCE = {"cpu": 1}
_BLOCKS_AT_ONCE_ELSEWHERE = 32


def fingerprint(tensor: Tensor) -> int:
    """Return a signed 64-bit integer that depends on every bit of a tensor, its dtype and its shape.

    Strides, the device and `requires_grad` are ignored. Every change of one element is detected; other changes are
    missed with a probability of about 2^-32. Another device copies a few bytes to the host.
    """
    return fingerprint_all({"": tensor})


@torch.no_grad()
def fingerprint_all(tensors: Mapping[str, Tensor]) -> int:
    """Return one fingerprint of many tensors, their names and order, to compare between devices of the same kinds."""
    digest = hashlib.blake2b(digest_size=8)
    by_device: dict[torch.device, list[Tensor]] = {}
    for name, tensor in tensors.items():
        parts = _dense_parts(tensor)
        shapes = [tuple(part.shape) for part in parts]
        digest.update(f"{name}\n{describe(tensor)}\n{shapes}\n".encode())
        for part in parts:
            by_device.setdefault(part.device, []).append(part)
    for device, parts in by_device.items():
        if sums := checksums(parts, device).tolist():
            digest.update(repr(sums).encode())
    return int.from_bytes(digest.digest(), "little", signed=True)


def checksums(parts: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return integers that depend on every bit of dense tensors of a device; the host does not wait."""
    size = _BYTES * _BLOCKS_AT_ONCE.get(device.type, _BLOCKS_AT_ONCE_ELSEWHERE)
    # One buffer for intermediate results: on a CPU, allocating memory would take longer than the hashing.
    scratch = torch.empty(_WORDS, dtype=torch.int64, device=device)
    sums = [part for words in _cut((_as_bytes(part) for part in parts), size) for part in _hash(words, scratch)]
    return torch.cat([*sums, scratch[:0]])


def describe(tensor: Tensor) -> str:
    """Return the dtype and shape of a tensor in words, such as `"float32 [7, 5]"`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if is_lazy(tensor):
        return f"{dtype}, uninitialized"
    if tensor.is_nested:
        return f"{dtype} nested [{tensor.size(0)}, ...]"
    layout = "" if tensor.layout == torch.strided else str(tensor.layout).removeprefix("torch.") + " "
    return f"{dtype} {layout}{list(tensor.shape)}"


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a tensor consists of."""
    if is_lazy(tensor) or tensor.is_meta:
        return []
    if tensor.is_nested:
        return list(tensor.detach().unbind())
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor if tensor.layout == torch.strided else tensor.to_dense()]


def _as_bytes(tensor: Tensor) -> Tensor:
    # A conjugated or negated tensor may have a flag instead of other values in memory.
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _cut(parts: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Yield words, [blocks, words of a block], of at most `size` bytes; small parts share a block."""
    pending: list[Tensor] = []
    held = 0
    for part in parts:
        length = part.numel()
        if length >= size:
            whole = length - length % size
            for start in range(0, whole, size):
                yield _as_words([part[start : start + size]])
            part, length = part[whole:], length - whole
        if held + length > size:
            yield _as_words(pending)
            pending, held = [], 0
        if length:
            pending.append(part)
            held += length
    if pending:
        yield _as_words(pending)


def _as_words(pieces: list[Tensor]) -> Tensor:
    length = sum(piece.numel() for piece in pieces)
    # Zeros do not change a sum, and the shapes are hashed too.
    padding = -length % (8 if length <= _BYTES else _BYTES)
    if len(pieces) > 1 or padding or pieces[0].storage_offset() % 8:
        pieces = [torch.cat([*pieces, pieces[0].new_zeros(padding)])]
    words = pieces[0].view(torch.int64)
    return words.view(-1, min(_WORDS, words.numel()))


def _hash(words: Tensor, scratch: Tensor) -> list[Tensor]:
    """Return two weighted sums, modulo 2^64, of each block of words, [blocks, words]; `scratch` is overwritten.

    Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014). The multipliers are odd,
    so that no change of one word is missed. The upper halves of the words are summed once more, because a product
    keeps few bits from the upper half of a word, and only the last one from its sign.
    """
    number = words.size(1)
    multipliers, multipliers_of_upper = _multipliers(words.device)
    if words.device.type == "cpu" and words.size(0) == 1:  # other devices have no `dot` of integers
        own = words.view(-1)
        upper = torch.bitwise_right_shift(own, 32, out=scratch[:number])
        return [torch.dot(own, multipliers[:number]).view(1), torch.dot(upper, multipliers_of_upper[:number]).view(1)]
    upper = words >> 32
    sums = [(words * multipliers[:number]).sum(1), upper.mul_(multipliers_of_upper[:number]).sum(1)]
    return [torch.stack(sums, dim=1).view(-1)]


@functools.lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return odd multipliers for the words of a block and for their upper halves; the same in every process."""
    numbers = bytearray(hashlib.shake_128(b"fingerprints of tensors").digest(2 * _BYTES))
    odd = torch.frombuffer(numbers, dtype=torch.int64).bitwise_or(1).to(device)
    return odd[:_WORDS], odd[_WORDS:]

"""Fingerprints of tensors: 64 bits that tell whether two tensors are the same, bit by bit."""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

# A block is what one set of multipliers covers: 256 KiB, of which a core's cache holds the few that are needed.
_WORDS = 1 << 15
_BYTES = 8 * _WORDS
# How many blocks are hashed at once. A CPU is fastest on what its cache holds; elsewhere a launch has to be worth it.
_BLOCKS_AT_ONCE = {"cpu": 1}
_BLOCKS_AT_ONCE_ELSEWHERE = 32


def fingerprint(tensor: Tensor) -> int:
    """Return 64 bits, as a signed integer, that depend on every bit of a tensor and on its dtype and shape.

    0.0 and -0.0 differ, and so do NaNs with other bits. Strides, the device and `requires_grad` do not count. Every
    change of one element is seen; other changes are missed with a probability of about 2^-32, on average over
    tensors, but not against somebody who looks for collisions.

    On a CUDA device nothing but a few bytes is copied to the host; that copy waits for the device.

    Args:
        tensor: Any tensor: dense, sparse or nested, of any dtype. A tensor on the meta device has dtype and shape only.

    Returns:
        The fingerprint. That of a dense tensor is the same on every device.
    """
    return fingerprint_all({"": tensor})


@torch.no_grad()
def fingerprint_all(tensors: Mapping[str, Tensor]) -> int:
    """Return one fingerprint of many tensors, their names and their order.

    Small tensors of one device are hashed together, and the host waits once per device. So two results can be
    compared if they were made of tensors on the same kinds of devices.

    Args:
        tensors: The tensors by name.

    Returns:
        64 bits as a signed integer, as from `fingerprint`.
    """
    digest = hashlib.blake2b(digest_size=8)
    by_device: dict[torch.device, list[Tensor]] = {}
    for name, tensor in tensors.items():
        parts = _dense_parts(tensor)
        shapes = [tuple(part.shape) for part in parts]
        digest.update(f"{name}\n{describe(tensor)}\n{shapes}\n".encode())
        for part in parts:
            by_device.setdefault(part.device, []).append(part)
    for device, parts in by_device.items():
        size = _BYTES * _BLOCKS_AT_ONCE.get(device.type, _BLOCKS_AT_ONCE_ELSEWHERE)
        # One place for what is computed on the way: on a CPU, new memory would take longer than all the rest.
        scratch = torch.empty(_WORDS, dtype=torch.int64, device=device)
        sums = [part for words in _cut((_as_bytes(part) for part in parts), size) for part in _hash(words, scratch)]
        if sums:
            digest.update(repr(torch.cat(sums).tolist()).encode())
    return int.from_bytes(digest.digest(), "little", signed=True)


def describe(tensor: Tensor) -> str:
    """Return dtype and shape of a tensor in words, such as `"float32 [7, 5]"`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if is_lazy(tensor):
        return f"{dtype}, uninitialized"
    if tensor.is_nested:
        return f"{dtype} nested [{tensor.size(0)}, ...]"
    layout = "" if tensor.layout == torch.strided else str(tensor.layout).removeprefix("torch.") + " "
    return f"{dtype} {layout}{list(tensor.shape)}"


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that hold what a tensor consists of."""
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
    # The conjugate and the negative of a tensor may be a flag on the tensor rather than in its memory.
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _cut(parts: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Cut bytes into words, [blocks, words of a block], of at most `size` bytes; what is small shares a block."""
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
    # Zeros add nothing to a sum; lengths are known from the shapes.
    padding = -length % (8 if length <= _BYTES else _BYTES)
    if len(pieces) > 1 or padding or pieces[0].storage_offset() % 8:
        pieces = [torch.cat([*pieces, pieces[0].new_zeros(padding)])]
    words = pieces[0].view(torch.int64)
    return words.view(-1, min(_WORDS, words.numel()))


def _hash(words: Tensor, scratch: Tensor) -> list[Tensor]:
    """Multiply the words of each block by numbers of their own and add the products, modulo 2^64.

    Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014). The multipliers are odd,
    so that no change of one word is missed. The upper halves of the words are summed once more: a product keeps few of
    the bits that come from the upper half of a word, and none but the last of those that come from its sign.

    Args:
        words: int64, [blocks, words].
        scratch: int64, [words] at least; is overwritten.

    Returns:
        The two sums of each block, block by block, in tensors to be joined.
    """
    number = words.size(1)
    multipliers, multipliers_of_upper = _multipliers(words.device)
    if words.device.type == "cpu" and words.size(0) == 1:  # elsewhere, integers have no `dot`
        own = words.view(-1)
        upper = torch.bitwise_right_shift(own, 32, out=scratch[:number])
        return [
            torch.dot(own, multipliers[:number]).view(1),
            torch.dot(upper, multipliers_of_upper[:number]).view(1),
        ]
    upper = words >> 32
    sums = [(words * multipliers[:number]).sum(1), upper.mul_(multipliers_of_upper[:number]).sum(1)]
    return [torch.stack(sums, dim=1).view(-1)]


@functools.lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return odd numbers for the words of a block, and others for their upper halves; the same in every process."""
    numbers = bytearray(hashlib.shake_128(b"fingerprints of tensors").digest(2 * _BYTES))
    odd = torch.frombuffer(numbers, dtype=torch.int64).bitwise_or(1).to(device)
    return odd[:_WORDS], odd[_WORDS:]

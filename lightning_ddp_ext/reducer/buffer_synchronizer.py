"""Synchronisation of buffers with the gradients."""

import hashlib
import itertools
import math
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import Normalisation, flatten, version_of
from lightning_ddp_ext._devices import widest_float
from lightning_ddp_ext.consistency.fingerprints import describe, fingerprint
from lightning_ddp_ext.consistency.setups import compare_setups, find_ignored
from lightning_ddp_ext.distributed.exchange import gather_integers
from lightning_ddp_ext.distributed.flat_tensors import overwrite
from lightning_ddp_ext.reducer.control import ExchangedControl

_Spec = tuple[torch.Size, torch.dtype, torch.device]


class BufferTable:
    """The buffers of a module in a fixed order, until the structure of the module changes.

    Buffers that belong to one rank are not in the table. `tensors` and `specs` hold None for buffers that are None or
    not dense. `structure` is a hash of names, types and shapes, of 48 bits.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[nn.Module] = []
        self._tree: list[object] = [None]
        self.places: list[tuple[nn.Module, str]] = []  # owners and names
        self.tensors: list[Tensor | None] = []
        self.specs: list[_Spec | None] = []
        self.structure = 0
        self.update()

    def update(self) -> None:
        """Read the buffers of the module again, which is cheap while its structure is the same."""
        walked = self._find_tree() != self._tree
        if walked:
            self._walk()
        buffers = [owner._buffers.get(name) for owner, name in self.places]
        self.tensors = [one if one is not None and one.layout is torch.strided else None for one in buffers]
        specs = [None if one is None else (one.shape, one.dtype, one.device) for one in self.tensors]
        if walked or specs != self.specs:
            self.specs = specs
            text = repr(list(self.describe().items()))
            self.structure = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")

    def describe(self) -> dict[str, object]:
        """Describe the buffers, for `compare_setups`."""
        return {
            f"buffer `{name}`": "None" if tensor is None else describe(tensor)
            for name, tensor in zip(self._names, self.tensors, strict=True)
        }

    def _find_tree(self) -> list[object]:
        # By identity: modules may define `==` in another way, as metrics do.
        tree: list[object] = [id(child) for part in self._parts for child in part._modules.values()]
        return tree + [name for part in self._parts for name in part._buffers]

    def _walk(self) -> None:
        ignored = find_ignored(self._module)
        self._parts = list(self._module.modules())
        self._tree = self._find_tree()
        found = [
            (f"{prefix}.{name}".strip("."), part, name)
            for prefix, part in self._module.named_modules()
            for name in part._buffers
        ]
        self._names = [full for full, _, _ in found if full not in ignored]
        self.places = [(part, name) for full, part, name in found if full not in ignored]


_LOW = 2**32 - 1
_PIECE = 2**20  # elements of a large tensor that are sent at once


def is_mean(dtype: torch.dtype) -> bool:
    """Return True if ranks average buffers of this type; other types are copied from one rank."""
    return dtype.is_floating_point or dtype.is_complex


class BufferTransfer:
    """The sum of buffers over ranks in flight: one message per device, whatever the types.

    Buffers of a device without double precision travel with those on the CPU.

    Values are sent in double precision. A value that is equal on all ranks is therefore unchanged, to the last bit in
    types of up to 32 bits: its sum, divided by the total weight, is rounded to it. An integer of up to 64 bits is sent
    as two numbers.
    """

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor], weight: float, is_source: bool, group: dist.ProcessGroup) -> None:
        self._tensors = tensors
        self._members: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for member, tensor in enumerate(tensors):
            if tensor.numel():
                self._members.setdefault((tensor.device, tensor.dtype), []).append(member)
        encoded: dict[torch.device, list[Tensor]] = {}
        for (device, dtype), members in self._members.items():
            values = _encode(flatten([tensors[member] for member in members]).to(_sender(device)))
            factor = weight if is_mean(dtype) else float(is_source)
            # A rank without weight may hold nan, and 0 * nan is nan.
            encoded.setdefault(values.device, []).append(values * factor if factor else torch.zeros_like(values))
        self._flats = {device: torch.cat(parts) for device, parts in encoded.items()}
        self._works: list[Any] = [dist.all_reduce(flat, group=group, async_op=True) for flat in self._flats.values()]

    def wait_for_buffers(self) -> None:
        """Wait for the messages of all ranks."""
        for work in self._works:
            work.wait()

    @torch.no_grad()
    def write(self, wanted: Container[int], total: float) -> None:
        """Write the values of all ranks to the tensors at the `wanted` positions; `total` is the sum of the weights."""
        self.wait_for_buffers()
        rest = dict(self._flats)
        for (device, dtype), members in self._members.items():
            tensors = [self._tensors[member] for member in members]
            size = sum(map(torch.numel, tensors)) * (1 if dtype.is_floating_point else 2)
            sender = _sender(device)
            encoded, rest[sender] = rest[sender][:size], rest[sender][size:]
            values = _decode(encoded / total if is_mean(dtype) else encoded, dtype).to(device)
            overwrite(tensors, values, [member in wanted for member in members])


def _sender(device: torch.device) -> torch.device:
    return device if widest_float(device) == torch.float64 else torch.device("cpu")


def _encode(values: Tensor) -> Tensor:
    """Convert flat values to double precision: complex numbers and integers become two numbers each."""
    if values.is_complex():
        return torch.view_as_real(values).reshape(-1).double()
    if values.is_floating_point():
        return values.double()
    integers = values.long()
    return torch.cat([integers >> 32, integers & _LOW]).double()


def _decode(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(encoded.view(-1, 2)).to(dtype)
    if dtype.is_floating_point:
        return encoded.to(dtype)
    high, low = encoded.long().chunk(2)
    return ((high << 32) | low).to(dtype)


_FORGETTING = 20  # synchronisations without a change after which none is expected
_LEARNING = 3  # synchronisations in which buffers are compared by value
_LARGE = 2**20  # bytes

_Seen = tuple["weakref.ref[Tensor]", int]


class BufferSynchronizer:
    """Makes buffers equal on all ranks after any rank has changed them.

    Floating-point and complex buffers become the weighted mean, others come from the first rank with data. Buffers that
    changed lately are sent before ranks agree on what has changed; the first change of a buffer costs a message.
    Large changed buffers are compared by fingerprints first, for which the host waits, and sent in pieces if they
    differ.

    A change shows in the version of the tensor. torch's batch normalisation does not increase it: its buffers, and
    others that change as silently in the first steps, are taken as changed in training mode.

    Buffers may change shape, become None or be registered later, if they do so on all ranks in the same step. Buffers
    that are not dense, or belong to `find_ignored`, are left alone.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._table = BufferTable(module)
        self._group = group
        self._rank = dist.get_rank(group)
        self._source = 0  # the first rank with data in the last synchronisation
        self._ahead: BufferTransfer | None = None
        self._expected: dict[int, int] = {}  # buffers that are likely to change: synchronisations since they did
        self._seen: list[_Seen | None] = []
        self._values: list[Tensor | None] = []
        self._accept()

    @property
    def structure(self) -> int:
        """Hash of names, types and shapes of the buffers of this rank."""
        return self._table.structure

    def __len__(self) -> int:
        """Number of buffers that all ranks have agreed on."""
        return len(self._specs)

    def tensors(self) -> list[Tensor]:
        """Return the dense buffers."""
        return [buffer for buffer in self._table.tensors if buffer is not None]

    def remember(self) -> None:
        """Record the present state of the buffers as equal on all ranks."""
        buffers = self._table.tensors
        self._seen = [None if buffer is None else (weakref.ref(buffer), version_of(buffer)) for buffer in buffers]
        learning = self._comparisons < _LEARNING
        self._values = [None if buffer is None else buffer.detach().clone() for buffer in buffers] if learning else []

    def start(self, weight: float) -> None:
        """Send the buffers that are likely to have changed, with the weight of this rank."""
        self._table.update()
        if self._expected:
            sent = [self._table.tensors[index] for index in self._expected] if self._is_agreed else self._stand_ins()
            self._ahead = self._transfer([buffer for buffer in sent if buffer is not None], weight)

    def changes(self) -> bytearray:
        """Mark the agreed buffers that have changed on this rank."""
        changed = bytearray(len(self._specs))
        if not self._is_agreed:
            return changed
        buffers = self._table.tensors
        for index, (buffer, seen) in enumerate(zip(buffers, self._seen, strict=True)):
            if buffer is not None:
                changed[index] = seen is None or seen[0]() is not buffer or seen[1] != version_of(buffer)
        self._comparisons += bool(self._values)
        pairs = {
            index: (value, buffer)
            for index, (buffer, value) in enumerate(zip(buffers, self._values, strict=False))
            if buffer is not None and value is not None and not changed[index] and index not in self.silent
        }
        differ = find_different(list(pairs.values()))
        found = itertools.compress(pairs, differ)
        self.silent.update(index for index in found if not same_values(*pairs[index]))
        for index in self.silent:
            changed[index] |= self._table.places[index][0].training
        return changed

    def state(self) -> dict[str, Any]:
        """Return the state as numbers and lists, the same on every rank."""
        return {
            "structure": self._structure,
            "expected": [list(pair) for pair in self._expected.items()],
            "source": self._source,
            "comparisons": self._comparisons,
        }

    def load(self, state: Mapping[str, Any], silent: Iterable[int]) -> None:
        """Restore the `state` of another synchroniser, and its `silent` on this rank, if the buffers are the same."""
        if state["structure"] == self._structure:
            self._expected = dict(state["expected"])
            self._source, self._comparisons = state["source"], state["comparisons"]
            self.silent.update(silent)
            self.remember()

    def finish(self, exchanged: ExchangedControl, weight: float) -> None:
        """Set buffers changed on any rank to the common value; average equally if all weights are 0.

        Raises `ReplicaMismatchError` on every rank if ranks have different buffers now.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.wait_for_buffers()
        if len(set(exchanged.structures)) > 1:
            compare_setups(self._table.describe(), self._group)
        changed: Iterable[int] = [index for index, ranks in enumerate(exchanged.changed) if ranks]
        if exchanged.structures[0] != self._structure:
            self._accept()
            changed = [index for index, spec in enumerate(self._specs) if spec is not None]
        total, arrived = exchanged.total_weight, set(self._expected)
        if not total:
            weight, total, arrived = 1.0, float(len(exchanged.weights)), set()
        elif exchanged.source != self._source:
            arrived = {index for index in arrived if (spec := self._specs[index]) and is_mean(spec[1])}
            self._source = exchanged.source
        if ahead is not None and arrived:
            wanted = arrived.intersection(changed)
            ahead.write([at for at, index in enumerate(self._expected) if index in wanted], total)
        self._send([index for index in changed if index not in arrived], weight, total)
        since = {index: number + 1 for index, number in self._expected.items()}
        since |= {index: 0 for index in changed if index not in self._large}
        self._expected = {index: number for index, number in since.items() if number < _FORGETTING}
        self.remember()

    @property
    def _is_agreed(self) -> bool:
        return self._table.structure == self._structure

    def _accept(self) -> None:
        """Take over the present buffers, of which none is known to be equal on all ranks."""
        self._structure, self._specs = self._table.structure, self._table.specs
        self._expected, self._values = {}, []
        self._seen = [None] * len(self._specs)
        self._comparisons = 0
        sizes = [0 if spec is None else spec[0].numel() * spec[1].itemsize for spec in self._specs]
        self._large = {index for index, size in enumerate(sizes) if size > _LARGE}
        self.silent = {  # change silently on this rank
            index
            for index, (owner, name) in enumerate(self._table.places)
            if isinstance(owner, Normalisation) and name in ("running_mean", "running_var")
            if self._specs[index] is not None
        }

    def _stand_ins(self) -> list[Tensor]:
        """Make zeros of the agreed shapes, so that this rank matches the messages of the other ranks."""
        specs = [self._specs[index] for index in self._expected]
        return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in filter(None, specs)]

    def _transfer(self, tensors: Sequence[Tensor], weight: float) -> BufferTransfer:
        return BufferTransfer(tensors, weight, self._rank == self._source, self._group)

    def _send(self, indices: Sequence[int], weight: float, total: float) -> None:
        small: list[Tensor] = []
        large: list[Tensor] = []
        for index in indices:
            buffer = self._table.tensors[index]
            if buffer is not None:
                (large if index in self._large else small).append(buffer)
        if small:
            self._transfer(small, weight).write(range(len(small)), total)
        if large:
            by_rank = gather_integers([fingerprint(buffer) for buffer in large], self._group)
            for buffer, *prints in zip(large, *by_rank, strict=True):
                if len(set(prints)) > 1:
                    rows = max(1, _PIECE // max(1, math.prod(buffer.shape[1:])))
                    for piece in torch.split(buffer, rows):  # which takes less memory at once
                        self._transfer([piece], weight).write(range(1), total)


def find_different(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Return for each pair of tensors of one shape if a value differs or is nan; the host waits once per device."""
    flags: dict[torch.device, list[Tensor]] = {}
    for one, other in pairs:
        flags.setdefault(one.device, []).append((one != other).any())
    read = {device: iter(torch.stack(own).tolist()) for device, own in flags.items()}
    return [next(read[one.device]) for one, _ in pairs]


def same_values(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same values, where nan equals nan."""
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())

"""Synchronisation of buffers with the gradients."""

import hashlib
import math
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import Normalisation, flatten, version_of
from lightning_ddp_ext.consistency.fingerprints import describe, fingerprint
from lightning_ddp_ext.consistency.setups import compare_setups, find_ignored
from lightning_ddp_ext.distributed.exchange import gather_integers
from lightning_ddp_ext.distributed.flat_tensors import overwrite
from lightning_ddp_ext.reducer.control import SyncReport

_Spec = tuple[torch.Size, torch.dtype, torch.device]


class BufferTable:
    """The buffers of a module in a fixed order, for as long as none comes, goes or gets another shape.

    Buffers that belong to a rank alone are left out; in the place of those that are None or not dense, there is None.

    Args:
        module: The module.

    Attributes:
        places: Owners and names of the buffers.
        tensors: The buffers.
        specs: Shape, type and device of each.
        structure: A number of 48 bits for names, types and shapes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[nn.Module] = []
        self._tree: list[object] = [None]
        self.places: list[tuple[nn.Module, str]] = []
        self.tensors: list[Tensor | None] = []
        self.specs: list[_Spec | None] = []
        self.structure = 0
        self.look()

    def look(self) -> None:
        """Look at the module again. It costs little as long as the structure is the same."""
        # By identity: modules may compare otherwise, as metrics do.
        tree: list[object] = [id(child) for part in self._parts for child in part._modules.values()]
        tree += [name for part in self._parts for name in part._buffers]
        walked = tree != self._tree
        if walked:
            self._walk()
        self.tensors = [_dense(owner._buffers.get(name)) for owner, name in self.places]
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

    def _walk(self) -> None:
        ignored = find_ignored(self._module)
        self._parts = list(self._module.modules())
        self._tree = [id(child) for part in self._parts for child in part._modules.values()]
        self._tree += [name for part in self._parts for name in part._buffers]
        found = [
            (f"{prefix}.{name}".strip("."), part, name)
            for prefix, part in self._module.named_modules()
            for name in part._buffers
        ]
        self._names = [full for full, _, _ in found if full not in ignored]
        self.places = [(part, name) for full, part, name in found if full not in ignored]


def _dense(buffer: Tensor | None) -> Tensor | None:
    return buffer if buffer is not None and buffer.layout is torch.strided else None


_LOW = 2**32 - 1
_PIECE = 2**20  # elements of a large tensor that are under way at once


def is_mean(dtype: torch.dtype) -> bool:
    """Tell whether ranks make a mean of buffers of this type; others come from one of them."""
    return dtype.is_floating_point or dtype.is_complex


class BufferTransfer:
    """Buffers added up over ranks, under way: one message for each device, whatever their types.

    They travel as double-precision numbers. So a value that all ranks have stays what it is, to the last bit in types
    of up to 32 bits: its sum, divided by the total weight, is rounded to it. Whole numbers, of up to 64 bits, take two.

    Args:
        tensors: The buffers of this rank, alike on every rank.
        weight: What this rank counts in means.
        is_source: Whether this rank is the one from which other values come.
        group: The ranks.
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
            values = _encode(flatten([tensors[member] for member in members]))
            factor = weight if is_mean(dtype) else float(is_source)
            # A rank that does not count may hold anything, and 0 * nan is nan.
            encoded.setdefault(device, []).append(values * factor if factor else torch.zeros_like(values))
        self._flats = {device: torch.cat(parts) for device, parts in encoded.items()}
        self._works: list[Any] = [dist.all_reduce(flat, group=group, async_op=True) for flat in self._flats.values()]

    def wait_for_buffers(self) -> None:
        """Wait until all ranks have added theirs."""
        for work in self._works:
            work.wait()

    @torch.no_grad()
    def write(self, wanted: Container[int], total: float) -> None:
        """Give buffers the values of all ranks.

        Args:
            wanted: Positions of these buffers among those that were sent.
            total: Sum of the weights.
        """
        self.wait_for_buffers()
        rest = dict(self._flats)
        for (device, dtype), members in self._members.items():
            tensors = [self._tensors[member] for member in members]
            size = sum(map(torch.numel, tensors)) * (1 if dtype.is_floating_point else 2)
            encoded, rest[device] = rest[device][:size], rest[device][size:]
            values = _decode(encoded / total if is_mean(dtype) else encoded, dtype)
            overwrite(tensors, values, [member in wanted for member in members])


def cut(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a large tensor along its first dimension into views, to be sent one after another: less memory at once."""
    rows = max(1, _PIECE // max(1, math.prod(tensor.shape[1:])))
    return iter(torch.split(tensor, rows))


def _encode(values: Tensor) -> Tensor:
    """Write values in a row as double-precision numbers: complex ones and whole ones as two each."""
    if values.is_complex():
        return torch.view_as_real(values).reshape(-1).double()
    if values.is_floating_point():
        return values.double()
    buffer_with_payload = values.long()
    return torch.cat([buffer_with_payload >> 32, buffer_with_payload & _LOW]).double()


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
    """Makes buffers equal on all ranks, if any rank has changed them.

    Floating-point and complex buffers become the mean by weight, others come from the first rank that had data. What
    has changed before travels ahead of what ranks agree on; the first change of a buffer costs a message of its own.
    Large buffers that have changed are compared first, by fingerprints, for which the host waits; they travel only if
    they differ, in pieces.

    A change is known from the tensor's version. torch's batch normalisation does not count its own: such buffers, and
    those that are found to change in the same silent way in the first steps, count as changed in training mode.

    Buffers may get another shape, become None or be registered later, if they do so on all ranks in the same step.
    Those that are not dense, and those of `find_ignored`, stay as they are.

    Args:
        module: The same module on every rank.
        group: The ranks.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._table = BufferTable(module)
        self._group = group
        self._rank = dist.get_rank(group)
        self._source = 0  # the first rank that had data, the last time
        self._ahead: BufferTransfer | None = None
        self._expected: dict[int, int] = {}  # buffers that are likely to change: synchronisations since they did
        self._seen: list[_Seen | None] = []
        self._values: list[Tensor | None] = []
        self._accept()

    @property
    def structure(self) -> int:
        """A number for the names, types and shapes of the buffers of this rank."""
        return self._table.structure

    def __len__(self) -> int:
        """Number of buffers that ranks know of each other."""
        return len(self._specs)

    def tensors(self) -> list[Tensor]:
        """Return the buffers."""
        return [buffer for buffer in self._table.tensors if buffer is not None]

    def remember(self) -> None:
        """Take the buffers as they are for equal on all ranks."""
        buffers = self._table.tensors
        self._seen = [None if buffer is None else (weakref.ref(buffer), version_of(buffer)) for buffer in buffers]
        learning = self._comparisons < _LEARNING
        self._values = [None if buffer is None else buffer.detach().clone() for buffer in buffers] if learning else []

    def start(self, weight: float) -> None:
        """Look at the buffers, and send what is likely to have changed.

        Args:
            weight: What this rank's buffers count.
        """
        self._table.look()
        if self._expected:
            sent = [self._table.tensors[index] for index in self._expected] if self._is_agreed else self._stand_ins()
            self._ahead = self._transfer([buffer for buffer in sent if buffer is not None], weight)

    def changes(self) -> bytearray:
        """Mark those that have changed on this rank, of the buffers that ranks know of each other."""
        changed = bytearray(len(self._specs))
        if not self._is_agreed:
            return changed
        buffers = self._table.tensors
        for index, (buffer, seen) in enumerate(zip(buffers, self._seen, strict=True)):
            if buffer is not None:
                changed[index] = seen is None or seen[0]() is not buffer or seen[1] != version_of(buffer)
        self._comparisons += bool(self._values)
        for index, (buffer, value) in enumerate(zip(buffers, self._values, strict=False)):
            if buffer is not None and value is not None and not changed[index] and not same_values(value, buffer):
                self._silent.add(index)
        for index in self._silent:
            changed[index] |= self._table.places[index][0].training
        return changed

    def state(self) -> dict[str, Any]:
        """Return what `load` needs; numbers and lists, the same on every rank."""
        return {
            "structure": self._structure,
            "expected": [list(pair) for pair in self._expected.items()],
            "source": self._source,
            "comparisons": self._comparisons,
        }

    @property
    def silent(self) -> list[int]:
        """The buffers that change silently on this rank."""
        return sorted(self._silent)

    def load(self, state: Mapping[str, Any], silent: Iterable[int]) -> None:
        """Know what another synchroniser knew of its buffers, if there are the same now.

        Args:
            state: Its `state`.
            silent: Its `silent`, on this rank.
        """
        if state["structure"] == self._structure:
            self._expected = dict(state["expected"])
            self._source, self._comparisons = state["source"], state["comparisons"]
            self._silent.update(silent)
            self.remember()

    def finish(self, report: SyncReport, weight: float) -> None:
        """Set what has changed on any rank to the value of all ranks; where all weigh 0, all count the same.

        Args:
            report: What ranks have agreed on.
            weight: What this rank's buffers count.

        Raises:
            ReplicaMismatchError: On every rank, if ranks have other buffers now, or buffers of other shapes.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.wait_for_buffers()
        if len(set(report.structures)) > 1:
            compare_setups(self._table.describe(), self._group)
        changed: Iterable[int] = [index for index, ranks in enumerate(report.changed) if ranks]
        if report.structures[0] != self._structure:
            self._accept()
            changed = [index for index, spec in enumerate(self._specs) if spec is not None]
        total, arrived = report.total_weight, set(self._expected)
        if not total:
            weight, total, arrived = 1.0, float(len(report.weights)), set()
        elif report.source != self._source:
            arrived = {index for index in arrived if self._is_mean(index)}
            self._source = report.source
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
        """Go on with the buffers that there are now; none of them is known to be equal on all ranks."""
        self._structure, self._specs = self._table.structure, self._table.specs
        self._expected, self._values = {}, []
        self._seen = [None] * len(self._specs)
        self._comparisons = 0
        sizes = [0 if spec is None else spec[0].numel() * spec[1].itemsize for spec in self._specs]
        self._large = {index for index, size in enumerate(sizes) if size > _LARGE}
        self._silent = {
            index
            for index, (owner, name) in enumerate(self._table.places)
            if isinstance(owner, Normalisation) and name in ("running_mean", "running_var")
            if self._specs[index] is not None
        }

    def _stand_ins(self) -> list[Tensor]:
        """Make what other ranks' buffers, as they were before, can be added to."""
        specs = [self._specs[index] for index in self._expected]
        return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in filter(None, specs)]

    def _transfer(self, tensors: Sequence[Tensor], weight: float) -> BufferTransfer:
        return BufferTransfer(tensors, weight, self._rank == self._source, self._group)

    def _send(self, indices: Sequence[int], weight: float, total: float) -> None:
        small, large = [], {}
        for index in indices:
            buffer = self._table.tensors[index]
            if buffer is not None and index in self._large:
                large[index] = buffer
            elif buffer is not None:
                small.append(buffer)
        if small:
            self._transfer(small, weight).write(range(len(small)), total)
        if large:
            by_rank = gather_integers([fingerprint(buffer) for buffer in large.values()], self._group)
            for buffer, *prints in zip(large.values(), *by_rank, strict=True):
                if len(set(prints)) > 1:
                    for piece in cut(buffer):
                        self._transfer([piece], weight).write(range(1), total)

    def _is_mean(self, index: int) -> bool:
        spec = self._specs[index]
        return spec is not None and is_mean(spec[1])


def same_values(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same values; nan equals nan."""
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())

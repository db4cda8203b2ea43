"""Synchronisation of buffers with the gradients."""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import (
    Normalisation,
    TensorVersions,
    checksums,
    equal_or_nan,
    find_ignored,
    flatten,
    ignore_in_ddp,
    is_persistent,
    read_all,
)
from lightning_ddp_ext._devices import widest_float
from lightning_ddp_ext.consistency import compare_setups, describe
from lightning_ddp_ext.distributed.exchange import gather_integers, gather_objects
from lightning_ddp_ext.errors import WarnOnce
from lightning_ddp_ext.reducer.buckets import overwrite

_Spec = tuple[torch.Size, torch.dtype, torch.device]


class BufferTable:
    """The buffers of a module in a fixed order, until the structure of the module changes.

    Buffers that belong to one rank are not in the table. `entries` and `specs` hold None for buffers that are None or
    not dense. `structure` is a hash of names, types and shapes, of 48 bits.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[nn.Module] = []
        self._tree: list[object] = [None]
        self.names: list[str] = []
        self.places: list[tuple[nn.Module, str]] = []  # owners and names
        self.specs: list[_Spec | None] = []
        self.update()

    def update(self) -> None:
        """Read the buffers of the module again, which is cheap while its structure is the same."""
        walked = self._find_tree() != self._tree
        if walked:
            self._walk()
        buffers = [owner._buffers.get(name) for owner, name in self.places]
        self.entries = [one if one is not None and one.layout is torch.strided else None for one in buffers]
        specs = [None if one is None else (one.shape, one.dtype, one.device) for one in self.entries]
        if walked or specs != self.specs:
            self.specs = specs
            text = repr(list(self.describe().items()))
            self.structure = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")

    def describe(self) -> dict[str, object]:
        """Describe the buffers, for `compare_setups`."""
        return {f"buffer `{name}`": text for name, text in self._texts()}

    def describe_caches(self) -> dict[str, str]:
        """Describe the buffers that are not part of the state dict, by name."""
        is_cache = [not is_persistent(*place) for place in self.places]
        return dict(itertools.compress(self._texts(), is_cache))

    def exclude(self, names: Sequence[str]) -> None:
        """Leave some buffers to each rank, which `ReplicaConsistency` then ignores too."""
        ignore_in_ddp(self._module, names)
        self._tree = [None]
        self.update()

    def _texts(self) -> list[tuple[str, str]]:
        texts = ["None" if tensor is None else describe(tensor) for tensor in self.entries]
        return list(zip(self.names, texts, strict=True))

    def _find_tree(self) -> list[object]:
        # By identity: modules may define `==` in another way, as metrics do. In few passes, as this runs in every step.
        children = itertools.chain.from_iterable([part._modules.values() for part in self._parts])
        return [*map(id, children), *itertools.chain.from_iterable([part._buffers for part in self._parts])]

    def _walk(self) -> None:
        ignored = find_ignored(self._module)
        self._parts = list(self._module.modules())
        self._tree = self._find_tree()
        found = [
            (f"{prefix}.{name}".strip("."), part, name)
            for prefix, part in self._module.named_modules()
            for name in part._buffers
        ]
        self.names = [full for full, _, _ in found if full not in ignored]
        self.places = [(part, name) for full, part, name in found if full not in ignored]


_LOW = 2**32 - 1
_DOUBLE = (torch.float64, torch.complex128)
_PIECE_NUMEL = 2**20


@torch.no_grad()
def average_buffers(
    tensors: Sequence[Tensor], weight: float, total: float, is_source: bool, group: dist.ProcessGroup
) -> None:
    """Overwrite real and complex tensors with the weighted mean over ranks, and others with the source's values.

    One message per device has the values in double precision, or on the CPU if the device lacks it. A value that is
    equal on all ranks stays, bit for bit: the mean is rounded to it in types of up to 32 bits, and in others, the
    source's value is sent too, and replaces a mean that differs from it by no more than the mean is rounded.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    messages: dict[torch.device, list[Tensor]] = {}
    for (device, dtype), members in kinds.items():
        wire_device = device if widest_float(device) == torch.float64 else torch.device("cpu")
        values = encode_numbers(flatten(members).to(wire_device))
        factors = [weight] * has_mean(dtype) + [float(is_source)] * (dtype in _DOUBLE or not has_mean(dtype))
        # A rank without weight may hold nan, and 0 * nan is nan.
        messages.setdefault(wire_device, []).extend(
            values * one if one else torch.zeros_like(values) for one in factors
        )
    received: dict[torch.device, Iterator[Tensor]] = {}
    for wire_device, parts in messages.items():
        flat = torch.cat(parts)
        dist.all_reduce(flat, group=group)  # on every rank, as all ranks have buffers of the same shapes
        received[wire_device] = iter(torch.split(flat, [part.numel() for part in parts]))
    for (device, dtype), members in kinds.items():
        arrived = received[device] if device in received else received[torch.device("cpu")]
        encoded = next(arrived) / total if has_mean(dtype) else next(arrived)
        if dtype in _DOUBLE:
            source, rounding = next(arrived), (dist.get_world_size(group) + 1) * torch.finfo(torch.float64).eps
            encoded = torch.where((encoded - source).abs() <= rounding * source.abs(), source, encoded)
        overwrite(members, decode_numbers(encoded, dtype).to(device))


def has_mean(dtype: torch.dtype) -> bool:
    """Return True if buffers of a type are averaged."""
    return dtype.is_floating_point or dtype.is_complex


def encode_numbers(values: Tensor) -> Tensor:
    """Convert flat values to double precision: complex numbers, and integers of up to 64 bits, become two numbers."""
    if values.is_complex():
        return torch.view_as_real(values).reshape(-1).double()
    if values.is_floating_point():
        return values.double()
    integers = values.long()
    return torch.cat([integers >> 32, integers & _LOW]).double()


def decode_numbers(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the result of `encode_numbers` back."""
    if dtype.is_complex:
        return torch.view_as_complex(encoded.view(-1, 2)).to(dtype)
    if dtype.is_floating_point:
        return encoded.to(dtype)
    high, low = encoded.long().chunk(2)
    return ((high << 32) | low).to(dtype)


_LEARNING = 3  # first synchronisations, or first changes of a buffer, in which values are compared
_LARGE_BYTES = 2**20


class BufferSynchronizer:
    """Makes buffers equal on all ranks after any rank has changed them.

    A change shows in the version of the tensor. torch's batch normalisation does not increase it: its buffers, and
    others that change as silently in the first steps, are taken as changed in training mode. Buffers may change shape,
    become None or be registered later, if they do so on all ranks in the same step.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._table = BufferTable(module)
        self._group = group
        self._rank = dist.get_rank(group)
        self._warn = WarnOnce()
        self.settles_itself = True  # else the caller calls `settle` after each batch
        self._sums: dict[int, Tensor] = {}  # checksums by the position of a buffer
        self._late: dict[int, Tensor] = {}  # integers that any rank has changed since `settle`
        self._weights = 1.0, 1.0, 0  # of this rank, of all, and the first rank with data, in the last synchronisation
        self._accept()

    @property
    def structure(self) -> int:
        """Hash of names, types and shapes of the buffers of this rank."""
        return self._table.structure

    @property
    def number(self) -> int:
        """Number of buffers that all ranks have agreed on."""
        return len(self._specs)

    def dense(self) -> list[Tensor]:
        """Return the dense buffers."""
        return [buffer for buffer in self._table.entries if buffer is not None]

    def remember(self) -> None:
        """Record the present state of the buffers as equal on all ranks."""
        buffers = self._table.entries
        self._seen = TensorVersions(buffers)
        is_learning = self._comparisons < _LEARNING
        known = {i: one for i, one in enumerate(buffers) if one is not None and i not in self._late}
        self._sums = dict(zip(known, checksums(known.values()), strict=True)) if is_learning else {}

    def find_changes(self) -> bytearray:
        """Read the buffers of the module again, and mark the agreed buffers that have changed on this rank."""
        self._table.update()
        changed = bytearray(len(self._specs))
        if self._table.structure != self._structure:
            return changed
        buffers = self._table.entries
        for index in self._seen.changed(buffers):
            changed[index] = buffers[index] is not None
        self._comparisons += bool(self._sums)
        known = {i: one for i, one in enumerate(buffers) if i in self._sums and one is not None and not changed[i]}
        sums = zip(known, checksums(known.values()), strict=True)
        self._silent.update(itertools.compress(known, read_all([found != self._sums[index] for index, found in sums])))
        for index in self._silent:
            changed[index] |= self._table.places[index][0].training
        return changed

    def synchronize(self, weights: Sequence[float], structures: Sequence[float], marks: Sequence[float]) -> None:
        """Set buffers changed on any rank to the common value, integers in `settle`; average equally without weights.

        `weights` and `structures` are of all ranks, `marks` above 0 for each buffer that any rank has changed.

        Raises `ReplicaMismatchError` on every rank if ranks have different buffers now.
        """
        if len(set(structures)) > 1:
            self._leave_caches_to_ranks()
        changed: Iterable[int] = itertools.compress(itertools.count(), marks)
        if self._table.structure != self._structure:
            self._accept()
            changed = range(len(self._specs))
        weights = weights if any(weights) else [1.0] * len(weights)
        source = next(rank for rank, weight in enumerate(weights) if weight)
        self._weights = weights[self._rank], sum(weights), source
        found = {index: buffer for index in changed if (buffer := self._table.entries[index]) is not None}
        early = {
            index: buffer for index, buffer in found.items() if has_mean(buffer.dtype) or index in self._statistics
        }
        # Writing to `data` increases no version, so that `settle` looks like no change.
        self._late |= {index: buffer.data for index, buffer in found.items() if index not in early}
        if early:
            self._equalize(early)
        self.remember()
        if self.settles_itself:
            self.settle()

    def settled(self) -> dict[str, Tensor]:
        """Return the values that `settle` would set now, by name. Call on every rank."""
        copies = {index: buffer.clone() for index, buffer in self._late.items()}
        self._equalize(copies, tells=False)  # hooks may make them equal before `settle`
        return {self._table.names[index]: value for index, value in copies.items()}

    def settle(self) -> None:
        """Copy integers from the first rank with data, once hooks have seen those of each rank. Call on every rank."""
        late, self._late = self._late, {}
        if late:
            self._equalize(late)

    def _equalize(self, buffers: Mapping[int, Tensor], tells: bool = True) -> None:
        weight, total, source = self._weights
        # Rank 0 finds means of different values, and the rank behind the source different integers.
        tells = tells and weight > 0 and not self._warn.has_warned
        own = {
            index: buffer.clone()
            for index, buffer in buffers.items()
            if tells and index not in self._statistics and self._compared[index] < _LEARNING
            if self._rank == (0 if has_mean(buffer.dtype) else source + 1)
        }
        self._compared.update(own.keys())
        small = [buffer for buffer in buffers.values() if buffer.nbytes <= _LARGE_BYTES]
        large = [buffer for buffer in buffers.values() if buffer.nbytes > _LARGE_BYTES]
        if large:  # on every rank, since shapes are equal
            by_rank = gather_integers(read_all(checksums(large)), self._group)
            large = [buffer for buffer, *prints in zip(large, *by_rank, strict=True) if len(set(prints)) > 1]
        # Pieces take less memory at once.
        rows = [max(1, _PIECE_NUMEL // max(1, math.prod(buffer.shape[1:]))) for buffer in large]
        pieces = [[piece] for split in map(torch.split, large, rows) for piece in split]
        for tensors in [small, *pieces]:
            average_buffers(tensors, weight, total, self._rank == source, self._group)
        self._warn_of_differences(own, buffers)

    def _leave_caches_to_ranks(self) -> None:
        """Exclude buffers of no state dict that differ in shape between ranks, such as masks of the batch.

        Raises `ReplicaMismatchError` on every rank if other buffers differ.
        """
        records = gather_objects(self._table.describe_caches(), self._group)
        names = dict.fromkeys(itertools.chain.from_iterable(records))
        self._table.exclude([name for name in names if len({record.get(name) for record in records}) > 1])
        compare_setups(self._table.describe(), self._group)

    def _warn_of_differences(self, own: Mapping[int, Tensor], buffers: Mapping[int, Tensor]) -> None:
        """Warn once if a buffer of this rank has got another value."""
        differ = next((index for index, value in own.items() if not same_values(value, buffers[index])), None)
        if differ is not None:
            name, is_mean = self._table.names[differ], has_mean(own[differ].dtype)
            kept = "its mean by the weights of the batches" if is_mean else f"the value of rank {self._weights[2]}"
            self._warn(
                f"buffer `{name}` was changed differently by each rank, and {kept} is kept. That is exact for a running"
                " mean. Add up integer counts, and reset them, in `on_train_batch_end`. A queue or a maximum needs the"
                " values of all ranks: gather them in the step, or use a metric. If each rank has its own buffer, call"
                f" `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [{name!r}])`."
            )

    def _accept(self) -> None:
        """Take over the present buffers, of which none is known to be equal on all ranks."""
        self._structure, self._specs = self._table.structure, self._table.specs  # that all ranks have agreed on
        self._sums, self._late = {}, {}
        self._seen = TensorVersions([None] * len(self._specs))
        self._comparisons = 0
        self._compared: Counter[int] = Counter()  # synchronisations in which a buffer was compared between ranks
        places = enumerate(self._table.places)
        self._statistics = {index: name for index, (owner, name) in places if isinstance(owner, Normalisation)}
        self._silent = {  # buffers that change silently on this rank
            index
            for index, name in self._statistics.items()
            if name in ("running_mean", "running_var") and self._specs[index] is not None
        }


def same_values(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same values, where nan equals nan."""
    return torch.equal(one, other) or bool(equal_or_nan(one, other).all())

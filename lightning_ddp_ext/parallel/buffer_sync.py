"""Making the buffers of ranks equal after a step."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import Normalisation, version_of
from lightning_ddp_ext.parallel.buffers import same_values
from lightning_ddp_ext.parallel.sync_control import SyncReport

_LOW = 2**32 - 1
_FORGETTING = 20  # synchronisations without a change after which none is expected
_LEARNING = 3  # synchronisations in which buffers are compared by value


class BufferSynchronizer:
    """Makes buffers equal on all ranks, if any rank has changed them.

    Floating-point and complex buffers become the mean by weight, others come from the first rank that had data. What
    has changed before travels ahead of what ranks agree on; the first change of a buffer costs a message of its own.

    A change is known from the tensor's version. torch's batch normalisation does not count its own: such buffers, and
    those that are found to change in the same silent way in the first steps, count as changed in training mode.

    Args:
        module: The same module on every rank. Buffers that are registered later are not seen.
        group: The ranks.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        found: dict[int, tuple[nn.Module, str]] = {}
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    found.setdefault(id(buffer), (part, name))
        self._places = list(found.values())
        self._silent = {index for index, place in enumerate(self._places) if _is_running_statistic(*place)}
        self._seen: list[tuple[int, int]] = []
        self._values: list[Tensor] = []
        self._comparisons = 0
        self._group = group
        self._rank = dist.get_rank(group)
        self._expected: dict[int, int] = {}  # buffers that are likely to change: synchronisations since they did
        self._source = 0  # the first rank that had data, the last time
        self._under_way: _Transfer | None = None

    def __len__(self) -> int:
        """Return the number of buffers."""
        return len(self._places)

    def tensors(self) -> list[Tensor]:
        """Return the buffers."""
        return [self._tensor(index) for index in range(len(self))]

    def remember(self) -> None:
        """Take the buffers as they are for equal on all ranks."""
        self._seen = [(id(buffer), version_of(buffer)) for buffer in self.tensors()]
        learning = self._comparisons < _LEARNING
        self._values = [buffer.detach().clone() for buffer in self.tensors()] if learning else []

    def changes(self) -> list[int]:
        """Return the numbers of the buffers that have changed on this rank."""
        now = [(id(buffer), version_of(buffer)) for buffer in self.tensors()]
        changed = {index for index, (old, new) in enumerate(zip(self._seen, now, strict=True)) if old != new}
        self._silent |= {index for index in self._find_differences() if index not in changed}
        return sorted(changed | {index for index in self._silent if self._places[index][0].training})

    def _find_differences(self) -> Iterator[int]:
        self._comparisons += bool(self._values)
        for index, value in enumerate(self._values):
            if not same_values(value, self._tensor(index)):
                yield index

    def start(self, weight: float) -> None:
        """Send what is likely to have changed.

        Args:
            weight: What this rank's buffers count.
        """
        self._under_way = self._send(sorted(self._expected), weight, self._source) if self._expected else None

    def finish(self, report: SyncReport, weight: float) -> None:
        """Set what has changed on any rank to the value of all ranks.

        Args:
            report: What ranks have agreed on.
            weight: What this rank's buffers count.
        """
        sent, self._under_way = self._under_way, None
        changed = [index for index, ranks in enumerate(report.changed) if ranks]
        unexpected = not set(changed) <= set(self._expected)
        from_another = report.source != self._source and any(not _is_mean(self._tensor(index)) for index in changed)
        self._source = report.source
        if sent is not None:
            sent.wait()
        if unexpected or from_another:
            sent = self._send(changed, weight, self._source)
            sent.wait()
        if sent is not None:
            self._receive(sent, changed, report.total_weight)
        since = {index: number + 1 for index, number in self._expected.items()} | dict.fromkeys(changed, 0)
        self._expected = {index: number for index, number in since.items() if number < _FORGETTING}
        self.remember()

    def skip(self) -> None:
        """Leave the buffers as they are: no rank had data."""
        if self._under_way is not None:
            self._under_way.wait()
        self._under_way = None

    def _tensor(self, index: int) -> Tensor:
        module, name = self._places[index]
        buffer = module._buffers[name]
        assert buffer is not None
        return buffer

    def _send(self, indices: Sequence[int], weight: float, source: int) -> "_Transfer":
        parts: dict[torch.device, list[Tensor]] = {}
        for index in indices:
            buffer = self._tensor(index).detach()
            # A rank without data may hold anything, and 0 * nan is nan.
            encoded = _encode(buffer)
            if _is_mean(buffer):
                encoded = encoded * weight if weight else torch.zeros_like(encoded)
            elif self._rank != source:
                encoded = torch.zeros_like(encoded)
            parts.setdefault(buffer.device, []).append(encoded)
        return _Transfer(indices, [torch.cat(encoded) for encoded in parts.values()], self._group)

    def _receive(self, transfer: "_Transfer", changed: Iterable[int], total: float) -> None:
        wanted = set(changed)
        rest = {flat.device: flat for flat in transfer.flats}
        for index in transfer.indices:
            buffer = self._tensor(index)
            size = _encoded_size(buffer)
            encoded, rest[buffer.device] = rest[buffer.device][:size], rest[buffer.device][size:]
            if index in wanted:
                buffer.copy_(_decode(encoded / total if _is_mean(buffer) else encoded, buffer))


class _Transfer:
    """Sums over ranks, under way."""

    def __init__(self, indices: Sequence[int], flats: list[Tensor], group: dist.ProcessGroup) -> None:
        self.indices = list(indices)
        self.flats = flats
        self._works: list[Any] = [dist.all_reduce(flat, group=group, async_op=True) for flat in flats]

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _is_running_statistic(module: nn.Module, name: str) -> bool:
    return isinstance(module, Normalisation) and name in ("running_mean", "running_var")


def _is_mean(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _encoded_size(buffer: Tensor) -> int:
    return buffer.numel() if buffer.is_floating_point() else 2 * buffer.numel()


def _encode(buffer: Tensor) -> Tensor:
    """Write a buffer as double-precision numbers: complex ones and whole ones, of up to 64 bits, as two each."""
    if buffer.is_complex():
        return torch.view_as_real(buffer).reshape(-1).double()
    flat = buffer.reshape(-1)
    if buffer.is_floating_point():
        return flat.double()
    whole = flat.long()
    return torch.cat([whole >> 32, whole & _LOW]).double()


def _decode(encoded: Tensor, buffer: Tensor) -> Tensor:
    if buffer.is_complex():
        return torch.view_as_complex(encoded.view(*buffer.shape, 2))
    if buffer.is_floating_point():
        return encoded.view(buffer.shape)
    high, low = encoded.long().chunk(2)
    return ((high << 32) | low).view(buffer.shape)

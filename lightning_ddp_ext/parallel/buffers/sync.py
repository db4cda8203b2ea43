"""Making the buffers of ranks equal after a step."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import Normalisation, version_of
from lightning_ddp_ext.parallel.buffers.table import BufferTable
from lightning_ddp_ext.parallel.buffers.transfer import BufferTransfer, cut, is_mean
from lightning_ddp_ext.parallel.consistency.fingerprints import fingerprint
from lightning_ddp_ext.parallel.consistency.setups import compare_setups
from lightning_ddp_ext.parallel.messages.exchange import gather_integers
from lightning_ddp_ext.parallel.messages.sync_control import SyncReport
from lightning_ddp_ext.parallel.replicas.buffers import same_values

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

"""Sums over virtual ranks along one fixed binary tree, whichever ranks compute which parts of a batch.

The parts are the leaves, in the order of the batch. The node of `size` leaves (a power of two) from the leaf `first` is
the sum of its two halves; halves behind the last part do not exist. A rank computes a run of parts, and adds the nodes
that lie in its run.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_ddp_ext._compat.torch import add_all_, add_number_, multiply_all_
from lightning_ddp_ext._devices import widest_float
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.reducer.bucket_transport import BucketTransport, CommHook
from lightning_ddp_ext.reducer.buckets import GradientBucket, overwrite
from lightning_ddp_ext.reducer.buffer_synchronizer import BufferSynchronizer, decode_numbers, encode_numbers, has_mean
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer

Node = tuple[int, int]
"""First leaf of a node of the tree, and its number of leaves, a power of two."""
Values = list[Tensor | None]
Add = Callable[[Node, Values, Node, Values], Values]


def nodes_of(first: int, parts: int) -> list[Node]:
    """Return the largest nodes that a run of parts consists of."""
    nodes, end = [], first + parts
    while first < end:
        size = first & -first or 1 << end.bit_length()
        while size > end - first:
            size //= 2
        nodes.append((first, size))
        first += size
    return nodes


def add_gradients(_: Node, older: Values, __: Node, newer: Values) -> Values:
    """Add the gradients of two nodes in place, where None stands for zeros."""
    pairs = [*zip(older, newer, strict=True)]
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    if both:
        add_all_([one for one, _ in both], [other for _, other in both])
    alone = [one if other is None else other for one, other in pairs if (one is None) != (other is None)]
    given = [one for one in alone if one is not None]
    if given:
        add_number_(given, 0.0)  # as a rank that has received zeros does: -0.0 + 0.0 is 0.0
    return [other if one is None else one for one, other in pairs]


class NodeSums:
    """The sums of the largest nodes of the parts that have been pushed so far, in order: log2(parts) + 1 at most."""

    def __init__(self, add: Add = add_gradients) -> None:
        self.entries: list[tuple[Node, Values]] = []
        self._add = add

    def push(self, part: int, values: Values) -> None:
        """Add the values of the next part."""
        node = (part, 1)
        while self.entries and self.entries[-1][0][1] == node[1] and not self.entries[-1][0][0] % (2 * node[1]):
            older, sums = self.entries.pop()
            values = self._add(older, sums, node, values)
            node = (older[0], 2 * node[1])
        self.entries.append((node, values))

    def copy(self, convert: Callable[[Values], Values]) -> "NodeSums":
        """Return a copy with converted values."""
        copied = NodeSums(self._add)
        copied.entries = [(node, convert(values)) for node, values in self.entries]
        return copied


class TreeSum:
    """Adds flat tensors of all ranks along the tree: each rank adds the nodes of all ranks in a range of the elements.

    Attributes:
        run: The parts of this rank in the current batch.
        sizes: Number of samples of each part.
    """

    def __init__(self, group: dist.ProcessGroup, parts: int) -> None:
        self._group, self._parts = group, parts
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self.run, self.sizes = range(0), (0,) * parts
        self._nodes: list[list[Node]] = []  # of each rank

    def begin(self, numbers: Sequence[int], sizes: Sequence[int]) -> None:
        """Begin a batch, of which the ranks compute these numbers of parts."""
        ends = [sum(numbers[: rank + 1]) for rank in range(self._ranks)]
        self._nodes = [nodes_of(end - number, number) for end, number in zip(ends, numbers, strict=True)]
        self.run, self.sizes = range(ends[self._rank] - numbers[self._rank], ends[self._rank]), tuple(sizes)

    def samples(self, node: Node) -> int:
        """Return the number of samples of a node."""
        return sum(self.sizes[node[0] : sum(node)])

    def start(self, rows: Sequence[Tensor], like: Tensor) -> tuple[Sequence[Tensor], Any]:
        """Start to send the flat sums of this rank's nodes; `like` has their form. Return what `finish` takes."""
        if self._ranks == 1:
            return rows, None
        chunk = -(-like.numel() // self._ranks)
        padded = like.new_zeros(len(rows), self._ranks * chunk)
        for own, row in zip(padded, rows, strict=True):
            own[: like.numel()].copy_(row)
        sent = padded.view(len(rows), self._ranks, chunk).transpose(0, 1).reshape(-1)
        numbers = [len(nodes) for nodes in self._nodes]
        received = like.new_empty(sum(numbers), chunk)
        splits = [number * chunk for number in numbers], [len(rows) * chunk] * self._ranks
        work = dist.all_to_all_single(received.view(-1), sent, *splits, group=self._group, async_op=True)
        return [*received], (work, sent)

    def finish(self, rows: Sequence[Tensor], pending: Any, like: Tensor) -> Tensor:
        """Return the sum over all parts, from the result of `start`."""
        if pending is not None:
            pending[0].wait()
        total = self._add(dict(zip((node for nodes in self._nodes for node in nodes), rows, strict=True)))
        if pending is None:
            return total
        gathered = like.new_empty(self._ranks, total.numel())
        dist.all_gather([*gathered], total, group=self._group)
        return gathered.view(-1)[: like.numel()]

    def _add(self, sums: Mapping[Node, Tensor]) -> Tensor:
        def add(first: int, size: int) -> Tensor:
            known = sums.get((first, size))
            if known is not None:
                return known
            left, half = add(first, size // 2), size // 2
            return left.add_(add(first + half, half)) if first + half < self._parts else left

        return add(0, 1 << (self._parts - 1).bit_length())


class TreeTransport(BucketTransport):
    """Adds up buckets along the tree; a bucket holds the gradients of this rank's last part, `sums` those before it."""

    def __init__(self, group: dist.ProcessGroup, tree: TreeSum) -> None:
        super().__init__(group, None, None)
        self.is_hook = True  # buckets carry no control message, whose numbers are added without a fixed order
        self.sums = NodeSums()
        self.last: int | None = None  # number of the last part; None on a rank without samples
        self._tree = tree

    @override
    def send(self, bucket: GradientBucket) -> None:
        own = bucket.buffer()
        sums = self.sums.copy(lambda values: [bucket.flatten(values)])
        for part in self._tree.run:
            if self.last is None or part >= self.last:
                sums.push(part, [own if part == self.last else None])
        rows = [torch.zeros_like(own) if row is None else row for _, (row,) in sums.entries]
        self._in_flight.append((bucket, self._tree.start(rows, own)))

    @override
    def wait_for_gradients(self) -> None:
        for bucket, (rows, pending) in self._in_flight:
            bucket.set_buffer(self._tree.finish(rows, pending, bucket.buffer()))
        self._in_flight.clear()


class VirtualBuffers(BufferSynchronizer):
    """Lets every part begin with the buffers from before the batch, and merges the buffers of all parts.

    Real and complex numbers become the mean of the parts by their samples, added along the tree in double precision;
    others are those of the first part with weight.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, tree: TreeSum) -> None:
        super().__init__(module, group)
        self._tree = tree
        self._totals = NodeSums(self._add)  # of values times samples; None for a buffer that no part has changed
        self._start: dict[int, Tensor] = {}  # values from before the batch
        self._kept: dict[int, Tensor] = {}  # numbers without a mean
        self._keeps_weighted = False  # these are of a part with weight
        self._last: tuple[int, bool] | None = None

    def begin(self) -> None:
        """Begin a batch."""
        self._table.update()
        self._start = {place: one.clone() for place, one in enumerate(self._table.entries) if one is not None}
        self._totals = NodeSums(self._add)
        self._kept, self._keeps_weighted, self._last = {}, False, None

    def end_part(self, part: int, is_weighted: bool, is_last: bool) -> None:
        """End a part, the last one of this rank before its backward pass."""
        if is_last:
            self._last = part, is_weighted
            return
        for place, value in self._record(part, is_weighted).items():
            value.data.copy_(self._start[place])  # which increases no version, so that the change is still found

    def _record(self, part: int, is_weighted: bool) -> dict[int, Tensor]:
        """Add the buffers of a part to the totals; return those that may have changed since the batch began."""
        self._table.update()
        if self._table.structure != self._structure:
            raise UnsupportedFeatureError(
                f"virtual rank {part}: `training_step` has added, removed or resized a buffer, which the next virtual"
                " rank would see. Register buffers of a fixed size, or leave `virtual_ranks` out."
            )
        entries = self._table.entries
        versions = self._seen.changed(entries)
        changed = {
            place: one for place, one in enumerate(entries) if one is not None and self._may_change(place, versions)
        }
        values: Values = [None] * len(entries)
        for place, one in changed.items():
            if has_mean(one.dtype):
                values[place] = self._weighted(one, self._tree.sizes[part])
        self._totals.push(part, values)
        if not self._kept or (is_weighted and not self._keeps_weighted):
            self._kept = {
                place: changed[place].clone() if place in changed else one
                for place, one in self._start.items()
                if not has_mean(one.dtype)
            }
        self._keeps_weighted |= is_weighted
        return changed

    def _may_change(self, place: int, versions: set[int]) -> bool:
        is_silent = place in self._silent and self._table.places[place][0].training
        # Multiples of types of up to 32 bits are exact, so that only others need the values of every part.
        is_wide = self._start[place].dtype in (torch.float64, torch.complex128)
        return bool(self._sums) or place in versions or is_silent or is_wide

    def _add(self, older: Node, totals: Values, newer: Node, others: Values) -> Values:
        for place, (one, other) in enumerate(zip(totals, others, strict=True)):
            if one is not None or other is not None:
                totals[place] = self._total(older, one, place).add_(self._total(newer, other, place))
        return totals

    def _total(self, node: Node, known: Tensor | None, place: int) -> Tensor:
        return self._weighted(self._start[place], self._tree.samples(node)) if known is None else known

    @staticmethod
    def _weighted(value: Tensor, samples: int) -> Tensor:
        wire = value.device if widest_float(value.device) == torch.float64 else torch.device("cpu")
        encoded = encode_numbers(value.detach().reshape(-1).to(wire))
        return encoded * samples if samples else torch.zeros_like(encoded)  # infinity times 0 is nan

    @override
    def find_changes(self) -> bytearray:
        changed = self._record(*self._last) if self._last is not None else {}
        marks = super().find_changes()
        for place in changed.keys() & self._kept.keys():
            changed[place].data.copy_(self._kept[place])
        nothing: Values = [None] * len(self._table.entries)
        for part in self._tree.run:
            if self._last is None or part > self._last[0]:
                self._totals.push(part, [*nothing])
        return marks

    @override
    def _equalize(self, buffers: Mapping[int, Tensor], tells: bool = True) -> None:
        means = {place: one for place, one in buffers.items() if has_mean(one.dtype) and one.numel()}
        others = {place: one for place, one in buffers.items() if not has_mean(one.dtype)}
        if others:
            super()._equalize(others, tells)
        if not means:
            return
        device = self._weighted(next(iter(means.values())), 0).device
        rows = [
            torch.cat([self._total(node, totals[place], place).to(device) for place in means])
            for node, totals in self._totals.entries
        ]
        like = torch.cat([self._weighted(one, 0).to(device) for one in means.values()])
        mean = self._tree.finish(*self._tree.start(rows, like), like) / sum(self._tree.sizes) + 0.0
        lengths = [one.numel() * (2 if one.is_complex() else 1) for one in means.values()]
        for one, part in zip(means.values(), torch.split(mean, lengths), strict=True):
            overwrite([one], decode_numbers(part, one.dtype).to(one.device))


class VirtualReducer(GradientReducer):
    """Adds gradients of virtual ranks along the tree; divides them by the weight of the window once, at its end.

    A batch begins with `begin`; `end_part` follows each backward pass but the last, which runs in `synchronize`. Each
    batch of an accumulation window is synchronised, because ranks may divide it in another way than the one before.

    Attributes:
        continues: Whether the window continues after the current batch.
    """

    def __init__(self, module: nn.Module, virtual_ranks: int, **options: Any) -> None:
        self._number = virtual_ranks
        super().__init__(module, **options)
        if self._sparse.members or self.normalizes_over_ranks:
            what = "embeddings with `sparse=True`" if self._sparse.members else "`SyncBatchNorm`"
            raise UnsupportedFeatureError(f"`virtual_ranks` does not support {what}. Leave one of them out.")
        self._scheduler.is_held = True  # a late gradient would be added in another order
        self._of_parts = [self.control.add() for _ in range(virtual_ranks)]
        self._carried: Values = []  # the sums of the earlier batches in this window
        self._window = 0.0  # weight of these
        self._unit, self._is_sum = 1.0, False
        self.continues = False

    @override
    def _make_sums(self, module: nn.Module, comm_hook: CommHook | None, comm_state: object) -> None:
        self._tree = TreeSum(self._group, self._number)
        self._transport = self._parts = TreeTransport(self._group, self._tree)
        self.buffers = self._part_buffers = VirtualBuffers(module, self._group, self._tree)

    def begin(
        self, numbers: Sequence[int], sizes: Sequence[int], begins_window: bool, unit: float, is_sum: bool
    ) -> None:
        """Begin a batch with parts of these sizes, of which ranks compute these numbers, on every rank.

        The sum of a window is multiplied by `unit`, and divided by the weight of the window unless it `is_sum`.
        """
        self.defer_hooks()
        self._tree.begin(numbers, sizes)
        self._unit, self._is_sum = unit, is_sum
        self._window *= not begins_window
        self._carried = [None if begins_window else parameter.grad for parameter in self._parameters]
        self.take_gradients()
        self._parts.sums, self._parts.last = NodeSums(), None
        for field in self._of_parts:
            field.value = 0.0
        self._part_buffers.begin()

    def take_gradients(self) -> Values:
        """Remove and return the gradients of this rank."""
        gradients: Values = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return gradients

    @torch.no_grad()
    def end_part(self, part: int, weight: float, is_last: bool) -> None:
        """End a part after its backward pass, the last one of this rank before it."""
        self._of_parts[part].value = weight
        self._part_buffers.end_part(part, weight > 0, is_last)
        if is_last:
            self._parts.last = part
            return
        gradients = self.take_gradients()
        self._parts.sums.push(part, gradients if weight else [None] * len(gradients))

    @override
    @torch.no_grad()
    def _finish(self) -> None:
        entries = self._parts.sums.entries
        for place, is_used in enumerate(self._scheduler.used()):
            if not is_used and any(values[place] is not None for _, values in entries):
                self._parameters[place].grad = torch.zeros_like(self._parameters[place])  # the last part used it not
        super()._finish()
        if not self.control.total_weight:
            self._end_batch()

    @override
    def _complete(self, late: Sequence[float], used: Sequence[float]) -> None:
        super()._complete(late, used)
        self._window += sum(sum(field.of_ranks) for field in self._of_parts)
        self._end_batch()

    def _end_batch(self) -> None:
        """Add the sums of the earlier batches, and divide by the weight of the window at its end."""
        self._parts.sums = NodeSums()
        for parameter, carried in zip(self._parameters, self._carried, strict=True):
            if carried is not None:
                parameter.grad = carried if parameter.grad is None else parameter.grad.add_(carried)
        self._carried = [None] * len(self._parameters)
        if not self.continues and self._window:
            gradients = [one.grad for one in self._parameters if one.grad is not None]
            multiply_all_(gradients, self._unit if self._is_sum else self._unit / self._window)

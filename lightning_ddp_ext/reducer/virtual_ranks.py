"""Sums over virtual ranks along one fixed binary tree, whichever ranks compute which parts of a batch.

The parts are the leaves, in the order of the batch. The node of `size` leaves (a power of two) from the leaf `first` is
the sum of its two halves; halves behind the last part do not exist. A rank computes a run of parts, and adds the nodes
that lie in its run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_ddp_ext._compat.torch import add_all_
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.reducer.bucket_transport import BucketTransport, CommHook
from lightning_ddp_ext.reducer.buckets import GradientBucket, overwrite
from lightning_ddp_ext.reducer.buffer_synchronizer import BufferSynchronizer, decode_numbers, encode_numbers, has_mean
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer

Node = tuple[int, int]
"""First leaf of a node of the tree, and its number of leaves, a power of two."""
Values = list[Tensor | None]
"""Tensors in a fixed order, with None for zeros."""


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


class NodeSums:
    """The sums of the largest nodes of the parts that have been pushed so far, in order: log2(parts) + 1 at most."""

    def __init__(self) -> None:
        self.entries: list[tuple[Node, Values]] = []

    def push(self, node: Node, values: Values) -> None:
        """Add the values of the next node; those of earlier nodes change in place."""
        first, size = node
        while self.entries and self.entries[-1][0][1] == size and not self.entries[-1][0][0] % (2 * size):
            (first, size), older = self.entries.pop()
            values, size = _add(older, values), 2 * size
        self.entries.append(((first, size), values))

    def total(self) -> Values:
        """Return the sum of all parts; nodes behind the last part do not exist."""
        *nodes, (_, total) = self.entries
        for _, values in reversed(nodes):
            total = _add(values, total)
        return total


def _add(older: Values, newer: Values) -> Values:
    pairs = [*zip(older, newer, strict=True)]
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    if both:
        add_all_([one for one, _ in both], [other for _, other in both])
    for one, other in pairs:
        alone = one if other is None else other if one is None else None
        if alone is not None:
            alone.add_(0.0)  # as a rank does that has received zeros: -0.0 + 0.0 is 0.0
    return [other if one is None else one for one, other in pairs]


class TreeSum:
    """Adds flat tensors of all ranks along the tree: each rank adds the nodes of all ranks in a range of the elements.

    `run` are the parts of this rank in the current batch, and `sizes` the samples of each part.
    """

    def __init__(self, group: dist.ProcessGroup, parts: int) -> None:
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self.run, self.sizes = range(0), [0] * parts
        self._nodes: list[list[Node]] = []  # of each rank

    def begin(self, numbers: Sequence[int], sizes: Sequence[int]) -> None:
        """Begin a batch, of which the ranks compute these numbers of parts."""
        runs = [range(sum(numbers[:rank]), sum(numbers[: rank + 1])) for rank in range(self._ranks)]
        self._nodes = [nodes_of(run.start, len(run)) for run in runs]
        self.run, self.sizes = runs[self._rank], [*sizes]

    def start(self, rows: Sequence[Tensor], like: Tensor) -> tuple[Sequence[Tensor], Any]:
        """Start to send the flat sums of this rank's nodes, in the form of `like`; return what `finish` takes."""
        if self._ranks == 1:
            return rows, None
        chunk = -(-like.numel() // self._ranks)
        padded = like.new_zeros(len(rows), self._ranks * chunk)
        for own, row in zip(padded, rows, strict=True):
            own[: like.numel()].copy_(row)
        sent = padded.view(len(rows), self._ranks, chunk).transpose(0, 1).reshape(-1)
        received = like.new_empty(sum(map(len, self._nodes)), chunk)
        splits = [len(nodes) * chunk for nodes in self._nodes], [len(rows) * chunk] * self._ranks
        work = dist.all_to_all_single(received.view(-1), sent, *splits, group=self._group, async_op=True)
        return [*received], (work, sent)

    def finish(self, rows: Sequence[Tensor], pending: Any, like: Tensor) -> Tensor:
        """Return the sum over all parts, from the result of `start`."""
        if pending is not None:
            pending[0].wait()
        sums = NodeSums()
        for node, row in zip((node for nodes in self._nodes for node in nodes), rows, strict=True):
            sums.push(node, [row])
        (total,) = sums.total()
        assert total is not None
        if pending is None:
            return total
        gathered = like.new_empty(self._ranks, total.numel())
        dist.all_gather([*gathered], total, group=self._group)
        return gathered.view(-1)[: like.numel()]


class TreeTransport(BucketTransport):
    """Adds up buckets along the tree; a bucket holds the gradients of this rank's last node, `earlier` the others."""

    def __init__(self, group: dist.ProcessGroup, tree: TreeSum) -> None:
        super().__init__(group, None, None)
        self.is_hook = True  # buckets carry no control message, whose numbers are added without a fixed order
        self.earlier: list[Values] = []
        self._tree = tree

    @override
    def send(self, bucket: GradientBucket) -> None:
        flat = GradientBucket(bucket.index(), bucket.params, bucket.members)
        rows = []
        for values in self.earlier:
            for member, parameter in zip(bucket.members, bucket.params, strict=True):
                parameter.grad = values[member]  # the gradients of the bucket have been packed
            flat.pack_all(1.0)
            rows.append(flat.buffer())
            flat.release()
        own = [bucket.buffer()] if self._tree.run else []
        self._in_flight.append((bucket, self._tree.start([*rows, *own], bucket.buffer())))

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

    tree: TreeSum
    start: Values  # from before the batch
    totals: Sequence[Values] = ()  # of values times samples, of the nodes of this rank
    _kept: tuple[bool, Values] = False, []  # numbers without a mean, and whether their part has weight

    def begin(self) -> None:
        """Begin a batch."""
        self._table.update()
        self.start = [None if one is None else one.clone() for one in self._table.entries]
        self._kept = False, []

    def record(self, part: int, is_weighted: bool) -> Values:
        """Return the values of a part that has ended, times its samples."""
        self._table.update()
        if self._table.structure != self._structure:
            raise UnsupportedFeatureError(
                f"virtual rank {part}: `training_step` has added, removed or resized a buffer, which the next virtual"
                " rank would see. Register buffers of a fixed size, or leave `virtual_ranks` out."
            )
        entries, samples = self._table.entries, self.tree.sizes[part]
        if not self._kept[1] or (is_weighted and not self._kept[0]):
            others = [None if one is None or has_mean(one.dtype) else one for one in entries]
            self._kept = is_weighted, [None if one is None else one.clone() for one in others]
        means = [None if one is None or not has_mean(one.dtype) else one for one in entries]
        return [None if one is None else _encoded(one) * samples for one in means]

    def write(self, values: Values) -> None:
        """Set the buffers without an increase of their versions, so that changes are still found."""
        for one, value in zip(self._table.entries, values, strict=False):
            if one is not None and value is not None:
                one.data.copy_(value)

    @override
    def find_changes(self) -> bytearray:
        changed = super().find_changes()
        self.write(self._kept[1])
        return changed

    @override
    def _equalize(self, buffers: Mapping[int, Tensor], tells: bool = True) -> None:
        means = {place: one for place, one in buffers.items() if has_mean(one.dtype) and one.numel()}
        super()._equalize({place: one for place, one in buffers.items() if place not in means}, tells)
        if not means:
            return
        zeros = [_encoded(one).zero_() for one in means.values()]
        found = ([(totals[place], zero) for place, zero in zip(means, zeros, strict=True)] for totals in self.totals)
        rows = [torch.cat([zero if one is None else one for one, zero in pairs]) for pairs in found]
        like = torch.cat(zeros)
        mean = self.tree.finish(*self.tree.start(rows, like), like) / sum(self.tree.sizes)
        for one, part in zip(means.values(), torch.split(mean, [*map(torch.numel, zeros)]), strict=True):
            overwrite([one], decode_numbers(part, one.dtype))


def _encoded(value: Tensor) -> Tensor:
    return encode_numbers(value.detach().clone().reshape(-1))


class VirtualReducer(GradientReducer):
    """Adds gradients of virtual ranks along the tree; divides them by the weight of the window once, at its end.

    A batch begins with `begin`; `end_part` follows each backward pass but the last, which runs in `synchronize`. Each
    batch of an accumulation window is synchronised, because ranks may divide it in another way than the one before.
    `continues` is True if the window continues after the current batch.
    """

    def __init__(self, virtual_ranks: int, module: nn.Module, **options: Any) -> None:
        self._number = virtual_ranks
        super().__init__(module, **options)
        if self._sparse.members or self.normalizes_over_ranks:
            what = "embeddings with `sparse=True`" if self._sparse.members else "`SyncBatchNorm`"
            raise UnsupportedFeatureError(f"`virtual_ranks` does not support {what}. Leave one of them out.")
        self._scheduler.is_held = True  # a late gradient would be added in another order
        self._of_parts = [self.control.add() for _ in range(virtual_ranks)]
        self._sums, self._last = NodeSums(), -1  # of gradients, and the number of this rank's last part
        self._carried: Values = []  # the sums of the earlier batches in this window
        self._window = 0.0  # weight of these
        self._unit, self._is_sum = 1.0, False
        self.continues = False

    @override
    def _make_sums(self, module: nn.Module, comm_hook: CommHook | None, comm_state: object) -> None:
        self._tree = TreeSum(self._group, self._number)
        self._transport = self._parts = TreeTransport(self._group, self._tree)
        self.buffers = self._buffers = VirtualBuffers(module, self._group)
        self._buffers.tree = self._tree

    def begin(self, numbers: Sequence[int], sizes: Sequence[int], is_first: bool, unit: float, is_sum: bool) -> None:
        """Begin a batch with parts of these sizes, of which ranks compute these numbers; maybe the first of a window.

        The sum of a window is multiplied by its first `unit`, and divided by its weight unless it `is_sum`.
        """
        self.defer_hooks()
        self._tree.begin(numbers, sizes)
        if is_first:
            self._unit, self._is_sum, self._window = unit, is_sum, 0.0
        gradients = self._take()
        self._carried = [None] * len(gradients) if is_first else gradients
        self._sums, self._last = NodeSums(), -1
        # Nothing is expected of the last backward pass, which would else move gradients into buckets.
        self._scheduler.predictor.load(())
        for field in self._of_parts:
            field.value = 0.0
        self._buffers.begin()

    def _take(self) -> Values:
        gradients: Values = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return gradients

    @torch.no_grad()
    def end_part(self, part: int, weight: float, is_last: bool) -> None:
        """End a part after its backward pass, the last one of this rank before it."""
        self._of_parts[part].value = weight
        self._last = part
        if not is_last:
            self._push(part)
            self._buffers.write(self._buffers.start)

    def _push(self, part: int) -> None:
        buffers = self._buffers.record(part, self._of_parts[part].value > 0)
        self._sums.push((part, 1), [*self._take(), *buffers])

    @override
    def synchronize(self, weight: float = 1.0, *_: Any, **__: Any) -> Any:
        return super().synchronize(weight, 1.0, 1.0)  # losses are weighted, and `_end_batch` divides

    @override
    @torch.no_grad()
    def _finish(self) -> None:
        number = len(self._parameters)
        nothing: Values = [None] * (number + len(self._buffers.start))
        for part in self._tree.run:
            if part == self._last:
                self._push(part)
            elif part > self._last:
                self._sums.push((part, 1), [*nothing])
        found = [values for _, values in self._sums.entries]
        self._buffers.totals = [values[number:] for values in found]
        *self._parts.earlier, last = found or [nothing]
        for place, parameter in enumerate(self._parameters):
            is_used = any(values[place] is not None for values in self._parts.earlier)
            parameter.grad = torch.zeros_like(parameter) if is_used and last[place] is None else last[place]
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
        self._sums, self._parts.earlier = NodeSums(), []
        divisor = 1.0 if self._is_sum else self._window
        for parameter, carried in zip(self._parameters, self._carried, strict=True):
            if carried is not None:
                parameter.grad = carried if parameter.grad is None else parameter.grad.add_(carried)
            if parameter.grad is not None and self._window and not self.continues:
                parameter.grad.mul_(self._unit / divisor)

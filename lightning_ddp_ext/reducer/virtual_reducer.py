"""Sums over virtual ranks along one fixed binary tree, whichever ranks compute which parts of a batch.

The parts are the leaves, in the order of the batch. The node of `size` leaves (a power of two) from the leaf `first` is
the sum of its two halves; halves behind the last part do not exist. A rank computes a run of parts, and adds the nodes
that lie in its run.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_ddp_ext._compat.torch import add_all_
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.reducer.buckets import divide_into_buckets, overwrite, take_gradient
from lightning_ddp_ext.reducer.buffer_synchronizer import BufferSynchronizer, decode_numbers, encode_numbers, has_mean
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer

Node = tuple[int, int]
"""First leaf of a node of the tree, and its number of leaves, a power of two."""
Values = list[Tensor | None]
"""Tensors in a fixed order, with None for nothing to add."""


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


def nodes_of(run: range) -> list[Node]:
    """Return the largest nodes that a run of parts consists of."""
    sums = NodeSums()
    for part in run:
        sums.push((part, 1), [])
    return [node for node, _ in sums.entries]


def _add(older: Values, newer: Values) -> Values:
    both = [(one, other) for one, other in zip(older, newer, strict=True) if one is not None and other is not None]
    if both:
        add_all_(*zip(*both, strict=True))
    return [other if one is None else one for one, other in zip(older, newer, strict=True)]


def _or_nothing(value: Tensor | None, like: Tensor) -> Tensor:
    # Not 0.0, which would change the sign of -0.0 if other ranks send zeros.
    return torch.full_like(like, -0.0).reshape(-1) if value is None else value.reshape(-1)


def _total(nodes: Sequence[Node], rows: Sequence[Values]) -> Values:
    """Return the sum of all parts, given the values of all nodes; nodes behind the last part do not exist."""
    sums = NodeSums()
    for node, row in zip(nodes, rows, strict=True):
        sums.push(node, row)
    *earlier, (_, total) = sums.entries
    for _, values in reversed(earlier):
        total = _add(values, total)
    return total


class TreeSum:
    """Adds the sums of all ranks along the tree: each rank adds the nodes of all ranks in a range of the elements.

    `run` are the parts of this rank in the current batch, and `sizes` the samples of each part.
    """

    def __init__(self, group: dist.ProcessGroup, cap: int) -> None:
        self._group = group
        self._cap = cap  # of the bytes in one message
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self.run, self.sizes = range(0), [0]
        self._nodes: list[list[Node]] = []  # of each rank

    def begin(self, numbers: Sequence[int], sizes: Sequence[int]) -> None:
        """Begin a batch, of which the ranks compute these numbers of parts."""
        runs = [range(start, end) for start, end in pairwise((0, *accumulate(numbers)))]
        self._nodes = [*map(nodes_of, runs)]
        self.run, self.sizes = runs[self._rank], [*sizes]

    def add_up(self, own: NodeSums, likes: Mapping[int, Tensor]) -> dict[int, Tensor | None]:
        """Return the sums over all parts at some places of their values, in the form of `likes`."""
        rows = [[values[place] for place in likes] for _, values in own.entries]
        if self._ranks == 1:
            return dict(zip(likes, _total(self._nodes[0], rows), strict=True))
        places, tensors, sent = list(likes), list(likes.values()), []
        for members in divide_into_buckets(tensors, range(len(tensors)), self._cap):
            like, numel = tensors[members[0]], sum(tensors[member].numel() for member in members)
            chunk = -(-numel // self._ranks)
            flat = like.new_zeros(len(rows), self._ranks * chunk)
            for target, row in zip(flat, rows, strict=True):
                found = [_or_nothing(row[member], tensors[member]) for member in members]
                torch.cat(found, out=target[:numel])
            flat = flat.view(len(rows), self._ranks, chunk).transpose(0, 1).reshape(-1)
            received = like.new_empty(sum(map(len, self._nodes)), chunk)
            splits = [len(nodes) * chunk for nodes in self._nodes], [len(rows) * chunk] * self._ranks
            work = dist.all_to_all_single(received.view(-1), flat, *splits, group=self._group, async_op=True)
            sent.append((members, numel, flat, received, work))
        sums = dict[int, Tensor | None]()
        for members, numel, _, received, work in sent:
            work.wait()
            (total,) = _total([*chain(*self._nodes)], [[row] for row in received])
            assert total is not None
            gathered = received.new_empty(self._ranks, len(total))
            dist.all_gather([*gathered], total, group=self._group)
            results = [torch.empty_like(tensors[member]) for member in members]
            overwrite(results, gathered.view(-1)[:numel])
            sums.update(zip((places[member] for member in members), results, strict=True))
        return sums


class VirtualBuffers(BufferSynchronizer):
    """Lets every part begin with the buffers from before the batch, and merges the buffers of all parts.

    Real and complex numbers become the mean of the parts by their samples, added along the tree in double precision;
    others are those of the first part with weight.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, tree: TreeSum) -> None:
        super().__init__(module, group)
        self._tree = tree
        self.start: Values = []  # from before the batch
        self._kept: tuple[bool, Values] | None = None  # numbers without a mean, and whether their part has weight
        self._part_sums = NodeSums()  # of values times samples

    def begin(self) -> None:
        """Begin a batch."""
        self._table.update()
        self.start = [None if one is None else one.clone() for one in self._table.entries]
        self._kept, self._part_sums = None, NodeSums()

    def end_part(self, part: int, is_weighted: bool) -> None:
        """Add the values of a part that has ended."""
        self._table.update()
        if self._table.structure != self._structure:
            raise UnsupportedFeatureError(
                f"virtual rank {part}: `training_step` has added, removed or resized a buffer, which the next virtual"
                " rank would see. Register buffers of a fixed size, or leave `virtual_ranks` out."
            )
        values = [None if one is None else one.detach() for one in self._table.entries]
        if self._kept is None or self._kept[0] < is_weighted:
            others = [None if one is None or has_mean(one.dtype) else one.clone() for one in values]
            self._kept = is_weighted, others
        means = [None if one is None or not has_mean(one.dtype) else one for one in values]
        means = [None if one is None else encode_numbers(one.reshape(-1)) * self._tree.sizes[part] for one in means]
        self._part_sums.push((part, 1), means)

    def write(self, values: Values) -> None:
        """Set the buffers without an increase of their versions, so that changes are still found."""
        for one, value in zip(self._table.entries, values, strict=False):
            if one is not None and value is not None:
                one.data.copy_(value)

    @override
    def find_changes(self) -> bytearray:
        changed = super().find_changes()
        if self._kept is not None:
            self.write(self._kept[1])
        return changed

    @override
    def _equalize(self, buffers: Mapping[int, Tensor], tells: bool = True) -> None:
        means = {place: one for place, one in buffers.items() if has_mean(one.dtype) and one.numel()}
        super()._equalize({place: one for place, one in buffers.items() if place not in means}, tells)
        encoded = {place: encode_numbers(one.reshape(-1)) for place, one in means.items()}
        for place, total in self._tree.add_up(self._part_sums, encoded).items():
            assert total is not None
            overwrite([means[place]], decode_numbers(total / sum(self._tree.sizes), means[place].dtype))


class VirtualReducer(GradientReducer):
    """Adds gradients of virtual ranks along the tree; divides them by the weight of the window once, at its end.

    A batch begins with `begin`; `end_part` follows each backward pass but the last, which runs in `synchronize`. Each
    batch of an accumulation window is synchronised, because ranks may divide it in another way than the one before.
    `continues` is True if the window continues after the current batch.
    """

    buffers: VirtualBuffers

    def __init__(self, virtual_ranks: int, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        if self._sparse.members or self.normalizes_over_ranks:
            what = "embeddings with `sparse=True`" if self._sparse.members else "`SyncBatchNorm`"
            raise UnsupportedFeatureError(f"`virtual_ranks` does not support {what}. Leave one of them out.")
        self._tree = TreeSum(self._group, self._layout.cap)
        self.buffers = VirtualBuffers(module, self._group, self._tree)
        self.buffers.remember()
        self._of_parts = [self.control.add() for _ in range(virtual_ranks)]
        self._sums = NodeSums()
        self._carried: Values = []  # the sums of the earlier batches in this window
        self._window = 0.0  # weight of these
        self._unit, self._is_sum, self.continues = 1.0, False, False

    def begin(self, numbers: Sequence[int], sizes: Sequence[int], is_first: bool, unit: float, is_sum: bool) -> range:
        """Begin a batch with parts of these sizes, of which ranks compute these numbers; return those of this rank.

        The sum of a window is multiplied by its first `unit`, and divided by its weight unless it `is_sum`.
        """
        self.defer_hooks()
        self._tree.begin(numbers, sizes)
        if is_first:
            self._unit, self._is_sum, self._window = unit, is_sum, 0.0
        gradients = self._take()
        self._carried = [None] * len(gradients) if is_first else gradients
        self._sums = NodeSums()
        for field in self._of_parts:
            field.value = 0.0
        self.buffers.begin()
        return self._tree.run

    def _take(self) -> Values:
        return [None if parameter.grad is None else take_gradient(parameter) for parameter in self._parameters]

    @torch.no_grad()
    def end_part(self, part: int, weight: float) -> None:
        """End a part after its backward pass, the last one of this rank before it."""
        self._of_parts[part].value = weight
        if part != self._tree.run[-1]:
            self._push(part)
            self.buffers.write(self.buffers.start)

    def _push(self, part: int) -> None:
        self.buffers.end_part(part, self._of_parts[part].value > 0)
        # The backward pass of an odd part adds its gradients to those of the part before it, in the cache; the last one
        # comes after Lightning has dropped gradients.
        run, is_odd = self._tree.run, part % 2
        if is_odd or part >= run[-1] - 1:
            self._sums.push((part - 1, 2) if is_odd and run[0] < part < run[-1] else (part, 1), self._take())

    @override
    def synchronize(self, weight: float = 1.0, *_: Any, **__: Any) -> Any:
        return super().synchronize(weight)  # losses are weighted, and `_end_batch` divides

    @override
    @torch.no_grad()
    def _finish(self) -> None:
        if self._tree.run:
            self._push(self._tree.run[-1])
        if max(self._scheduler.predictor.counts, default=0) > 1:
            raise UnsupportedFeatureError(
                "with `virtual_ranks`, a backward pass gave a parameter several gradients one after another, as reused"
                " layers do that are recomputed. Use `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`."
            )
        for place, parameter in enumerate(self._parameters):  # any gradient shows that the parameter is used
            found = (values[place] for _, values in self._sums.entries)
            parameter.grad = next((one for one in found if one is not None), None)
        super()._finish()
        if not self.control.total_weight:
            self._end_batch()

    @override
    def _complete(self, late: Sequence[float], used: Sequence[float]) -> None:
        self._window += sum(sum(field.of_ranks) for field in self._of_parts)
        likes = {place: parameter for place, parameter in enumerate(self._parameters) if used[place]}
        for place, total in self._tree.add_up(self._sums, likes).items():
            self._parameters[place].grad = total
        self._end_batch()

    def _end_batch(self) -> None:
        """Add the sums of the earlier batches, and divide by the weight of the window at its end."""
        self._sums = NodeSums()
        ends = self._window and not self.continues
        factor = self._unit / (1.0 if self._is_sum else self._window) if ends else 1.0
        for parameter, carried in zip(self._parameters, self._carried, strict=True):
            if carried is not None:
                parameter.grad = carried if parameter.grad is None else parameter.grad.add_(carried)
            if parameter.grad is not None and factor != 1.0:
                parameter.grad.mul_(factor)

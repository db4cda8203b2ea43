"""Sums over virtual ranks along one fixed binary tree, whichever ranks compute which parts of a batch.

The parts are the leaves, in the order of the batch. The node of `size` leaves (a power of two) from the leaf `first` is
the sum of its two halves; halves behind the last part do not exist. A rank computes a run of parts, and adds the nodes
that lie in its run.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_ddp_ext._compat.torch import add_all_
from lightning_ddp_ext._devices import are_deterministic
from lightning_ddp_ext.distributed.exchange import digest
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.reducer.bucket_transport import BucketTransport
from lightning_ddp_ext.reducer.buckets import NOTHING, GradientBucket, overwrite, take_gradient
from lightning_ddp_ext.reducer.buffer_synchronizer import BufferSynchronizer, decode_numbers, encode_numbers, has_mean
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer

_SPARSE = "`virtual_ranks` does not support embeddings with `sparse=True`. Leave one of them out."

Node = tuple[int, int]
"""First leaf of a node of the tree, and its number of leaves, a power of two."""
Values = dict[int, Tensor]
"""Tensors by their places among parameters or buffers; those without a value are missing."""


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
        sums.push((part, 1), {})
    return [node for node, _ in sums.entries]


def _add(older: Values, newer: Values) -> Values:
    both = [place for place in older if place in newer]
    if both:
        add_all_([older[place] for place in both], [newer[place] for place in both])
    return {**newer, **older}


def _total(nodes: Sequence[Node], rows: Sequence[Tensor]) -> Tensor:
    """Return the sum of all parts, given the values of all nodes; nodes behind the last part do not exist."""
    sums = NodeSums()
    for node, row in zip(nodes, rows, strict=True):
        sums.push(node, {0: row})
    *earlier, (_, total) = sums.entries
    for _, values in reversed(earlier):
        total = _add(values, total)
    return total[0]


class TreeSum:
    """Adds the sums of all ranks along the tree: each rank adds the nodes of all ranks in a range of the elements.

    `run` are the parts of this rank in the current batch, `own` its nodes, and `sizes` the samples of each part.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self.run, self.sizes = range(0), [0]
        self.own: list[Node] = []
        self._nodes: list[list[Node]] = []  # of each rank
        self.numbers: Sequence[int] = []  # of parts of each rank

    def begin(self, numbers: Sequence[int], sizes: Sequence[int]) -> None:
        """Begin a batch, of which the ranks compute these numbers of parts."""
        runs = [range(start, end) for start, end in pairwise((0, *accumulate(numbers)))]
        self._nodes, self.numbers = [*map(nodes_of, runs)], [*numbers]
        self.run, self.own, self.sizes = runs[self._rank], self._nodes[self._rank], [*sizes]

    def padding(self, numel: int) -> int:
        """Return how many elements are missing to equal ranges on all ranks."""
        return -numel % self._ranks

    def send(self, rows: Sequence[Tensor], result: Tensor) -> Callable[[], Any]:
        """Send flat, padded sums of the nodes of this rank; return the function that waits and sets `result`.

        It becomes the sum of all parts, and may be one of the rows.
        """
        if self._ranks == 1:
            return lambda: result.copy_(_total(self.own, rows))
        if [*map(len, self._nodes)] == [1, 1]:
            return self._exchange(rows[0], result)
        ranges = result.view(self._ranks, -1)
        chunk = ranges.shape[1]
        flat = rows[0] if len(rows) == 1 else torch.cat([ranges[:, :0], *(row.view_as(ranges) for row in rows)], 1)
        received = result.new_empty(sum(map(len, self._nodes)), chunk)
        splits = [len(nodes) * chunk for nodes in self._nodes], [len(rows) * chunk] * self._ranks
        work = dist.all_to_all_single(received.view(-1), flat.view(-1), *splits, group=self._group, async_op=True)

        def wait() -> None:
            work.wait()
            dist.all_gather([*ranges], _total([*chain(*self._nodes)], [*received]), group=self._group)

        return wait

    def _exchange(self, row: Tensor, result: Tensor) -> Callable[[], Any]:
        """Send the whole row to the other of two ranks: as much traffic as in ranges, in one call instead of two."""
        received = torch.empty_like(row)
        splits = [0 if rank == self._rank else len(row) for rank in range(2)]
        work = dist.all_to_all_single(received, row, splits, splits, group=self._group, async_op=True)
        earlier, later = (received, row) if self._rank else (row, received)

        def wait() -> None:
            work.wait()
            torch.add(earlier, later, out=result)

        return wait


class TreeTransport(BucketTransport):
    """Adds up buckets along the tree: a bucket has the gradients of the last part of this rank, `sums` those before."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group, None, None)
        self.tree, self.sums = TreeSum(group), NodeSums()

    @override
    def send(self, bucket: GradientBucket) -> None:
        """Start to add up a bucket, with the gradients in `sums`, which are dropped."""
        rows = [GradientBucket(bucket.index(), bucket.params, bucket.members) for _ in self.tree.own[1:]]
        for row in rows:
            row.payload_numel = bucket.payload_numel
            row.buffer().fill_(NOTHING)
        rows += [bucket] if self.tree.run else []  # the node of the last part
        for number, (_, values) in reversed([*enumerate(self.sums.entries)]):
            views, places = rows[min(number, len(rows) - 1)].gradients(), bucket.position.items()
            found = [(views[position], values.pop(place)) for place, position in places if place in values]
            if found:
                add_all_(*zip(*found, strict=True))
        sent = [row.buffer_with_payload() for row in rows]
        self._in_flight.append((bucket, self.tree.send(sent, bucket.buffer_with_payload())))

    @override
    def wait_for_gradients(self) -> None:
        for _, wait in self._in_flight:
            wait()
        self._in_flight.clear()


class VirtualBuffers(BufferSynchronizer):
    """Lets every part begin with the buffers from before the batch, and merges the buffers of all parts.

    Real and complex numbers become the mean of the parts by their samples, added along the tree in double precision;
    others are those of the first part with weight.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, tree: TreeSum) -> None:
        super().__init__(module, group)
        self._tree = tree
        self.start: Values = {}  # from before the batch
        self._kept: tuple[bool, Values] | None = None  # numbers without a mean, and whether their part has weight
        self._part_sums = NodeSums()  # of values times samples

    def begin(self) -> None:
        """Begin a batch."""
        self._table.update()
        self.start = {place: one.clone() for place, one in self._present()}
        self._kept, self._part_sums = None, NodeSums()

    def _present(self) -> list[tuple[int, Tensor]]:
        return [(place, one.detach()) for place, one in enumerate(self._table.entries) if one is not None]

    def end_part(self, part: int, is_weighted: bool) -> None:
        """Add the values of a part that has ended."""
        self._table.update()
        if self._table.structure != self._structure:
            raise UnsupportedFeatureError(
                f"virtual rank {part}: `training_step` has added, removed or resized a buffer, which the next virtual"
                " rank would see. Register buffers of a fixed size, or leave `virtual_ranks` out."
            )
        values = self._present()
        if self._kept is None or self._kept[0] < is_weighted:
            self._kept = is_weighted, {place: one.clone() for place, one in values if not has_mean(one.dtype)}
        size = self._tree.sizes[part]
        means = {place: encode_numbers(one.reshape(-1)) * size for place, one in values if has_mean(one.dtype)}
        self._part_sums.push((part, 1), means)

    def write(self, values: Values) -> None:
        """Set the buffers without an increase of their versions, so that changes are still found."""
        for place, one in self._present():
            if place in values:
                one.data.copy_(values[place])

    @override
    def find_changes(self) -> bytearray:
        changed = super().find_changes()
        if self._kept is not None:
            self.write(self._kept[1])
        return changed

    @override
    def synchronize(self, weights: Sequence[float], *others: Sequence[float]) -> None:
        # If no part has weight, a rank without parts must not be the source.
        super().synchronize(weights if any(weights) else self._tree.numbers, *others)

    @override
    def _equalize(self, buffers: Mapping[int, Tensor], tells: bool = True) -> None:
        means = {place: one for place, one in buffers.items() if has_mean(one.dtype) and one.numel()}
        super()._equalize({place: one for place, one in buffers.items() if place not in means}, tells)
        for device in dict.fromkeys(one.device for one in means.values()):
            places = [place for place, one in means.items() if one.device == device]
            encoded = [encode_numbers(means[place].reshape(-1)) for place in places]
            padding = encoded[0].new_zeros(self._tree.padding(sum(map(len, encoded))))
            rows = [torch.cat([*(values[place] for place in places), padding]) for _, values in self._part_sums.entries]
            total = torch.cat([*encoded, padding])
            self._tree.send(rows, total)()
            total /= sum(self._tree.sizes)
            for place, part in zip(places, torch.split(total, [*map(len, encoded), len(padding)]), strict=False):
                overwrite([means[place]], decode_numbers(part, means[place].dtype))


class VirtualReducer(GradientReducer):
    """Adds gradients of virtual ranks along the tree; divides them by the weight of the window once, at its end.

    A batch begins with `begin`; `end_part` follows each backward pass but the last, which runs in `synchronize`. Each
    batch of an accumulation window is synchronised, because ranks may divide it in another way than the one before.
    `continues` is True if the window continues after the current batch. With `keeps_older`, the gradient of a window is
    added to the gradients from before its first batch.
    """

    buffers: VirtualBuffers
    _transport: TreeTransport

    def __init__(self, virtual_ranks: int, module: nn.Module, keeps_older: bool = False, **options: Any) -> None:
        super().__init__(module, **options)
        if self._sparse.members:
            raise UnsupportedFeatureError(_SPARSE)
        if self.normalizes_over_ranks:
            raise UnsupportedFeatureError("`virtual_ranks` does not support `SyncBatchNorm`. Leave one of them out.")
        if any(one.device.type != "cpu" for one in self._parameters) and not are_deterministic():
            raise UnsupportedFeatureError(
                "`virtual_ranks` needs algorithms that are deterministic on a device. Call"
                " `torch.use_deterministic_algorithms(True)`, or use `Trainer(deterministic=True)`."
            )
        self._tree = self._transport.tree
        self.buffers = VirtualBuffers(module, self._group, self._tree)
        self.buffers.remember()
        self._of_parts = [self.control.add() for _ in range(virtual_ranks)]
        self._carried: Values = {}  # the sums of the earlier batches in this window
        self._older: Values = {}  # gradients of earlier windows
        self._window = 0.0  # weight of these
        self._unit, self._is_sum, self.continues, self.keeps_older = 1.0, False, False, keeps_older

    @override
    def _make_transport(self, *_: Any) -> TreeTransport:
        return TreeTransport(self._group)

    @override
    def _reserve_payload(self) -> None:
        """Send control messages alone, as the tree adds numbers only; pad buckets to equal ranges of all ranks."""
        for bucket in self._layout.buckets:
            bucket.payload_numel = self._tree.padding(sum(map(Tensor.numel, bucket.params)))

    @override
    def _setup(self) -> str:
        # The state of another reducer has other factors, and counts of gradients for which a bucket would not wait.
        return digest([super()._setup(), "virtual ranks"])

    def begin(self, numbers: Sequence[int], sizes: Sequence[int], is_first: bool, unit: float, is_sum: bool) -> range:
        """Begin a batch with parts of these sizes, of which ranks compute these numbers; return those of this rank.

        The sum of a window is multiplied by its last `unit`, and divided by its weight unless it `is_sum`.
        """
        self.defer_hooks()
        self._tree.begin(numbers, sizes)
        self._unit, self._is_sum = unit, is_sum
        self._carried = self._take()
        if is_first:
            self._older, self._carried, self._window = self._carried if self.keeps_older else {}, {}, 0.0
        self._transport.sums = NodeSums()
        for field in self._of_parts:
            field.value = 0.0
        self.buffers.begin()
        return self._tree.run

    def _take(self) -> Values:
        gradients = {place: one.grad for place, one in enumerate(self._parameters) if one.grad is not None}
        if any(gradient.layout != torch.strided for gradient in gradients.values()):
            raise UnsupportedFeatureError(_SPARSE)  # rows would be added in another order
        return {place: take_gradient(self._parameters[place]) for place in gradients}

    @torch.no_grad()
    def end_part(self, part: int, weight: float) -> None:
        """End a part after its backward pass, the last one of this rank before it."""
        self._of_parts[part].value = weight
        run, is_odd = self._tree.run, part % 2
        if part == run[-1]:
            return
        self._end_buffers(part)
        self.buffers.write(self.buffers.start)
        # The backward pass of an odd part adds its gradients to those of the part before it, in the cache; the last one
        # comes after Lightning has dropped gradients.
        if is_odd or part == run[-1] - 1:
            self._transport.sums.push((part - 1, 2) if is_odd and run[0] < part else (part, 1), self._take())

    def _end_buffers(self, part: int) -> None:
        self.buffers.end_part(part, self._of_parts[part].value > 0)

    @override
    def synchronize(self, weight: float = 1.0, *_: Any, **__: Any) -> Any:
        return super().synchronize(weight, 1.0, 1.0)  # losses are weighted, and `_end_batch` divides

    @override
    @torch.no_grad()
    def _finish(self) -> None:
        if self._tree.run:
            self._end_buffers(self._tree.run[-1])
        counts = self._scheduler.predictor.counts
        if max(counts, default=0) > 1:
            raise UnsupportedFeatureError(
                "with `virtual_ranks`, a backward pass gave a parameter several gradients one after another, as reused"
                " layers do that are recomputed. Use `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`."
            )
        # A gradient that comes after its bucket would be added in another order: buckets wait for all of theirs.
        counts[:] = [1] * len(counts)
        for place, is_used in enumerate(self._scheduler.used()):
            if not is_used and any(place in values for _, values in self._transport.sums.entries):
                self._parameters[place].grad = torch.full_like(self._parameters[place], NOTHING)
        super()._finish()

    @override
    def _end_batch(self, used: Sequence[float]) -> None:
        """Add the sums of the earlier batches; at the end of a window, divide by its weight and run hooks."""
        self._window += sum(sum(field.of_ranks) for field in self._of_parts)
        self._accumulate(self._carried)
        if self.continues:
            return
        used = [one.grad is not None for one in self._parameters]
        factor = self._unit / (1.0 if self._is_sum else self._window) if self._window else 1.0
        for parameter in self._parameters if factor != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self._accumulate(self._older)
        if self._window:
            self._scheduler.run_hooks(used, self._hook_context)

    def _accumulate(self, values: Values) -> None:
        for place, value in values.items():
            parameter = self._parameters[place]
            parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)

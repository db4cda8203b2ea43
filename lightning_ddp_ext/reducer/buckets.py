"""Flat gradient buckets and the assignment of parameters to buckets."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import copy_all_, views_of

# Gradients from this size on are scaled on their way into the buffer, in one pass over memory. Smaller ones are copied
# in one launch and scaled together.
LARGE = 16384  # elements


class GradientBucket:
    """Gradients of several parameters of one type and device, next to each other in memory.

    The buffer exists from the first gradient that is packed until `release`; gradients that are views of it keep its
    memory after that. Behind the gradients there may be room for what travels with them. The methods of
    `torch.distributed.GradBucket`, which has no constructor, have no docstring: what they return is what communication
    hooks expect.

    Args:
        index: Position in the order in which buckets are reduced.
        parameters: What the bucket holds gradients of.
        members: Their numbers in the reducer.

    Attributes:
        payload_numel: Elements behind the gradients until `release`; to be set while there is no buffer.
    """

    def __init__(self, index: int, parameters: Sequence[nn.Parameter], members: Sequence[int]) -> None:
        order = sorted(range(len(members)), key=lambda position: parameters[position].numel() < LARGE)
        self.members = [members[position] for position in order]
        self.params = [parameters[position] for position in order]
        self.position = {member: position for position, member in enumerate(self.members)}
        self.packed = [False] * len(order)
        self.missing = 0
        self.launched = False
        self.last = False
        self.payload_numel = 0
        self._index = index
        self._large = sum(parameter.numel() >= LARGE for parameter in self.params)
        # Dense memory formats other than the usual one, such as channels last.
        self._strides = {
            position: parameter.stride()
            for position, parameter in enumerate(self.params)
            if not parameter.is_contiguous() and torch.empty_like(parameter).stride() == parameter.stride()
        }
        self._buffer_with_payload: Tensor | None = None
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []

    def index(self) -> int:  # noqa: D102
        return self._index

    def buffer(self) -> Tensor:  # noqa: D102
        if self._flat is None:
            self._allocate()
        assert self._flat is not None
        return self._flat

    def gradients(self) -> list[Tensor]:  # noqa: D102
        self.buffer()
        return self._views

    def parameters(self) -> list[nn.Parameter]:  # noqa: D102
        return self.params

    def is_last(self) -> bool:  # noqa: D102
        return self.last

    def set_buffer(self, buffer: Tensor) -> None:  # noqa: D102
        self.buffer().copy_(buffer)

    def buffer_with_payload(self) -> Tensor:
        """Return all that travels: the gradients, and what is behind them."""
        self.buffer()
        assert self._buffer_with_payload is not None
        return self._buffer_with_payload

    def payload(self) -> Tensor:
        """Return what travels with the gradients."""
        buffer_with_payload = self.buffer_with_payload()
        return buffer_with_payload[buffer_with_payload.numel() - self.payload_numel :]

    @property
    def nbytes(self) -> int:
        """Size of the gradients in bytes."""
        return sum(parameter.nbytes for parameter in self.params)

    @torch.no_grad()
    def pack(self, member: int, scale: float) -> None:
        """Move one large gradient into the buffer, added to what is there; the parameter has none afterwards."""
        position = self.position[member]
        gradient = _take(self.params[position])
        view = self.gradients()[position]
        if not scale:
            # Nothing may come of a gradient that counts nothing, and 0 * nan is nan.
            view.zero_()
        elif self.packed[position]:
            view.add_(gradient, alpha=scale)
        else:
            torch.mul(gradient, scale, out=view)
        self.packed[position] = True

    @torch.no_grad()
    def pack_all(self, scale: float) -> None:
        """Move all gradients that are there into the buffer; those that are missing count as zero."""
        flat, views = self.buffer(), self.gradients()
        targets, gradients = [], []
        for position, parameter in enumerate(self.params):
            if parameter.grad is None:
                if not self.packed[position]:
                    views[position].zero_()
            elif position < self._large:
                self.pack(self.members[position], scale)
            else:
                targets.append(views[position])
                gradients.append(_take(parameter))
                self.packed[position] = True
        if gradients:
            copy_all_(targets, gradients)
            small = flat[sum(view.numel() for view in views[: self._large]) :]
            small.mul_(scale) if scale else small.zero_()

    def write_back(self, used: Sequence[float]) -> None:
        """Give the parameters their gradients, views of the buffer; those that no rank has used keep none."""
        for member, parameter, view in zip(self.members, self.params, self.gradients(), strict=True):
            if used[member]:
                parameter.grad = view

    def renumber(self, index: int) -> None:
        """Take another position in the order in which buckets are reduced."""
        self._index = index

    def release(self) -> None:
        """Let go of the buffer and of what was packed."""
        self._buffer_with_payload = self._flat = None
        self.payload_numel = 0
        self._views = []
        self.packed = [False] * len(self.params)
        self.launched = False

    def _allocate(self) -> None:
        first = self.params[0]
        size = sum(parameter.numel() for parameter in self.params)
        self._buffer_with_payload = torch.empty(size + self.payload_numel, dtype=first.dtype, device=first.device)
        self._flat = self._buffer_with_payload[:size]
        self._views = views_of(self._flat, self.params)
        for position, strides in self._strides.items():
            view = self._views[position]
            self._views[position] = view.as_strided(view.shape, strides)


def _take(parameter: nn.Parameter) -> Tensor:
    """Take a gradient from a parameter. A sparse one becomes dense, such as that of `functional.embedding`."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    gradient = gradient.detach() if gradient.requires_grad else gradient
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


_FIRST_BYTES = 2**20  # the first bucket is small, so that communication starts early; as in torch
_REVIEW = 100  # synchronisations between two looks at what is still used


class GradientLayout:
    """The buckets, which grow with what has been used anywhere; the same on every rank at any time.

    It starts empty. Parameters that some rank has used and that are in no bucket yet get new ones at the end: in the
    first step, when a layer is thawed, when a head is used for the first time. Buckets most of which no rank has used
    for a while are dissolved; what is used of them enters again.

    Args:
        parameters: All parameters, the same on every rank.
        excluded: Numbers of those that are never in a bucket.
        bucket_cap_mb: Largest size of a bucket in MiB.
        group: The ranks.

    Attributes:
        buckets: In the order in which they are sent.
        bucket_of: The bucket of each parameter.
        unassigned: Numbers of parameters that are in no bucket and may get one.
        cap: Largest size of a bucket in bytes.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        excluded: Container[int],
        bucket_cap_mb: float,
        group: dist.ProcessGroup,
    ) -> None:
        self.buckets: list[GradientBucket] = []
        self.bucket_of: list[GradientBucket | None] = [None] * len(parameters)
        self.unassigned = {member for member in range(len(parameters)) if member not in excluded}
        self._parameters = parameters
        self.cap = int(bucket_cap_mb * 2**20)
        self._group = group
        self._recently_used = [0.0] * len(parameters)
        self._synchronizations = 0

    def grow(self, used: Sequence[float], order: Sequence[int], source: int) -> list[GradientBucket]:
        """Make buckets for parameters that were used for the first time.

        Args:
            used: Above 0 for what any rank has used; the same on every rank.
            order: In which this rank's gradients became ready.
            source: The rank whose order counts.

        Returns:
            The new buckets.
        """
        new = sorted((member for member in self.unassigned if used[member]), reverse=True)
        if not new:
            return []
        begin = len(self.buckets)
        self._append(self._divide(self._agree_on_order(new, order, source)))
        return self.buckets[begin:]

    def evict_unused_buckets(self, used: Sequence[float]) -> None:
        """Dissolve buckets of which too little is used, now and then.

        Args:
            used: Above 0 for what any rank has used in this synchronisation; the same on every rank.
        """
        self._synchronizations += 1
        self._recently_used = list(map(max, self._recently_used, used))
        if self._synchronizations % _REVIEW:
            return
        idle = [bucket for bucket in self.buckets if 2 * self._used_bytes(bucket) < bucket.nbytes]
        self._recently_used = [0.0] * len(self._recently_used)
        for bucket in idle:
            self.unassigned.update(bucket.members)
            for member in bucket.members:
                self.bucket_of[member] = None
        self.buckets = [bucket for bucket in self.buckets if bucket not in idle]
        for index, bucket in enumerate(self.buckets):
            bucket.renumber(index)
        self._mark_last()

    def state(self) -> dict[str, Any]:
        """Return what is in which bucket, and what else `load` needs; numbers and lists, the same on every rank."""
        return {
            "buckets": [bucket.members for bucket in self.buckets],
            "recently_used": [member for member, used in enumerate(self._recently_used) if used],
            "synchronizations": self._synchronizations,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Have the buckets of a layout with the same parameters; while there are none."""
        self._append(state["buckets"])
        for member in state["recently_used"]:
            self._recently_used[member] = 1.0
        self._synchronizations = state["synchronizations"]

    def _append(self, divided: Iterable[Sequence[int]]) -> None:
        for members in divided:
            bucket = GradientBucket(len(self.buckets), [self._parameters[member] for member in members], members)
            self.buckets.append(bucket)
            for member in members:
                self.bucket_of[member] = bucket
            self.unassigned.difference_update(members)
        self._mark_last()

    def _used_bytes(self, bucket: GradientBucket) -> int:
        return sum(
            parameter.nbytes
            for member, parameter in zip(bucket.members, bucket.params, strict=True)
            if self._recently_used[member]
        )

    def _agree_on_order(self, new: list[int], order: Sequence[int], source: int) -> list[int]:
        # A parameter is complete when its last gradient has come; one that the source did not use goes last.
        last = {member: position for position, member in enumerate(order)}
        positions = torch.tensor([last.get(member, len(order)) for member in new])
        dist.broadcast(positions, group=self._group, group_src=source)
        return [member for _, member in sorted(zip(positions.tolist(), new, strict=True), key=lambda pair: pair[0])]

    def _divide(self, members: Sequence[int]) -> list[list[int]]:
        """Divide parameters in order into lists of one type and device, each up to the size of a bucket."""
        divided: list[list[int]] = []
        unfinished: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for member in members:
            parameter = self._parameters[member]
            kind = (parameter.dtype, parameter.device)
            current = unfinished.setdefault(kind, [])
            current.append(member)
            cap = min(self.cap, _FIRST_BYTES) if not self.buckets and not divided else self.cap
            if sum(self._parameters[other].nbytes for other in current) >= cap:
                divided.append(unfinished.pop(kind))
        return divided + list(unfinished.values())

    def _mark_last(self) -> None:
        for bucket in self.buckets:
            bucket.last = bucket is self.buckets[-1]

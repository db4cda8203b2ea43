"""Flat buckets: many tensors in one message, and the assignment of gradients to buckets."""

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import copy_all_, flatten, views_of

_BUCKET_BYTES = 25 * 2**20  # what torch's own DistributedDataParallel uses


def send_all(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Return tensors of one device on each of several devices, in flat buckets: one transfer per bucket and device."""
    if not tensors or all(to == tensors[0].device for to in devices):
        return [list(tensors) for _ in devices]
    dense = _dense(tensors)
    in_buckets = set(dense)
    sent = [[one if number in in_buckets else one.to(to) for number, one in enumerate(tensors)] for to in devices]
    away = [(to, on_device) for to, on_device in zip(devices, sent, strict=True) if dense and to != tensors[0].device]
    for bucket in divide_into_buckets(tensors, dense) if away else ():
        members = [tensors[position] for position in bucket]
        flat = torch.cat([member.reshape(-1) for member in members])
        for device, on_device in away:
            parts = torch.split(flat.to(device, non_blocking=True), [member.numel() for member in members])
            for position, member, part in zip(bucket, members, parts, strict=True):
                on_device[position] = part.view(member.shape)
    return sent


@torch.no_grad()
def broadcast_all(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite dense tensors with the values of rank 0, in flat buckets; sparse tensors stay unchanged."""
    for bucket in divide_into_buckets(tensors, _dense(tensors)):
        members = [tensors[position] for position in bucket]
        flat = flatten(members)
        # As bytes: no backend supports every dtype.
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
        overwrite(members, flat)


@torch.no_grad()
def overwrite(targets: Sequence[Tensor], flat: Tensor) -> None:
    """Write flat values into several non-empty tensors in few kernel launches, memory shared by `expand` once."""
    are_rows = all(target.dim() == 1 for target in targets)
    parts = torch.split(flat, list(map(torch.numel, targets))) if are_rows else views_of(flat, targets)
    pairs = [_distinct(*pair) if 0 in pair[0].stride() else pair for pair in zip(targets, parts, strict=True)]
    copy_all_(*zip(*pairs, strict=True))


def _distinct(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    one = tuple(slice(1) if stride == 0 else slice(None) for stride in target.stride())
    return target[one], source[one]


def divide_into_buckets(
    tensors: Sequence[Tensor], members: Iterable[int], cap: int = _BUCKET_BYTES, first_cap: int | None = None
) -> list[list[int]]:
    """Divide positions of tensors, in order, by type and device into buckets that end once they reach `cap` bytes."""
    buckets: list[list[int]] = []
    unfinished: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for member in members:
        tensor = tensors[member]
        kind = (tensor.dtype, tensor.device)
        unfinished.setdefault(kind, []).append(member)
        sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
        if sizes[kind] >= (cap if buckets or first_cap is None else first_cap):
            buckets.append(unfinished.pop(kind))
            del sizes[kind]
    return buckets + list(unfinished.values())


def _dense(tensors: Sequence[Tensor]) -> list[int]:
    return [number for number, one in enumerate(tensors) if one.layout == torch.strided and one.numel()]


_LARGE = 16384  # elements
NOTHING = -0.0  # added to any number, does not change its bits; 0.0 changes those of -0.0


def is_packed_alone(parameter: nn.Parameter) -> bool:
    """Return True if a gradient is scaled on its way into the buffer, in one pass over memory; others go together.

    On other devices than the CPU kernel launches count: one copies all gradients of a bucket, another one scales them.
    """
    return parameter.numel() >= _LARGE and parameter.device.type == "cpu"


class GradientBucket:
    """Gradients of several parameters of one type and device, contiguous in memory, with an optional payload behind.

    The buffer exists from the first packed gradient until `release`; the gradients of the parameters are views of it.
    Set `payload_numel` while there is no buffer; the payload is zero at first. Communication hooks expect the methods
    of torch's `GradBucket`: `index`, `buffer`, `gradients`, `parameters`, `is_last` and `set_buffer`.
    """

    def __init__(self, index: int, parameters: Sequence[nn.Parameter], members: Sequence[int]) -> None:
        order = sorted(range(len(members)), key=lambda position: not is_packed_alone(parameters[position]))
        self.members = [members[position] for position in order]
        self.params = [parameters[position] for position in order]
        self.position = {member: position for position, member in enumerate(self.members)}
        self.packed = [False] * len(order)
        self.missing = 0
        self.launched = False
        self.last = False
        self.payload_numel = 0
        self._index = index
        self._large = sum(map(is_packed_alone, self.params))
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
            first, size = self.params[0], sum(parameter.numel() for parameter in self.params)
            self._buffer_with_payload = torch.empty(size + self.payload_numel, dtype=first.dtype, device=first.device)
            self._buffer_with_payload[size:].zero_()
            self._flat = self._buffer_with_payload[:size]
            self._views = views_of(self._flat, self.params)
            for position, strides in self._strides.items():
                view = self._views[position]
                self._views[position] = view.as_strided(view.shape, strides)
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
        """Return the tensor that is sent: the gradients and the payload behind them."""
        self.buffer()
        assert self._buffer_with_payload is not None
        return self._buffer_with_payload

    def payload(self) -> Tensor:
        """Return the part of the buffer behind the gradients."""
        buffer = self.buffer_with_payload()
        return buffer[buffer.numel() - self.payload_numel :]

    @torch.no_grad()
    def pack(self, member: int, scale: float) -> None:
        """Move one large gradient into the buffer and add it to the value there; the parameter then has none."""
        position = self.position[member]
        gradient = take_gradient(self.params[position])
        view = self.gradients()[position]
        if not scale:
            view.fill_(NOTHING)  # a gradient without weight may be nan, and 0 * nan is nan
        elif self.packed[position]:
            view.add_(gradient, alpha=scale)
        else:
            torch.mul(gradient, scale, out=view)
        self.packed[position] = True

    @torch.no_grad()
    def pack_all(self, scale: float) -> None:
        """Move all gradients into the buffer, and `NOTHING` for missing ones."""
        flat, views = self.buffer(), self.gradients()
        targets, gradients = [], []
        for position, parameter in enumerate(self.params):
            if parameter.grad is None:
                if not self.packed[position]:
                    views[position].fill_(NOTHING)
            elif position < self._large:
                self.pack(self.members[position], scale)
            else:
                targets.append(views[position])
                gradients.append(take_gradient(parameter))
                self.packed[position] = True
        if gradients:
            copy_all_(targets, gradients)
            small = flat[sum(view.numel() for view in views[: self._large]) :]
            small.mul_(scale) if scale else small.fill_(NOTHING)

    def write_back(self, used: Sequence[float]) -> None:
        """Set the gradients of the parameters that any rank has used to views of the buffer."""
        for member, parameter, view in zip(self.members, self.params, self.gradients(), strict=True):
            if used[member]:
                parameter.grad = view

    def release(self) -> None:
        """Drop the buffer and forget which gradients were packed."""
        self._buffer_with_payload = self._flat = None
        self.payload_numel = 0
        self._views = []
        self.packed = [False] * len(self.params)
        self.launched = False


def take_gradient(parameter: nn.Parameter) -> Tensor:
    """Remove and return the gradient of a parameter, dense even if it was sparse, as of `functional.embedding`."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    gradient = gradient.detach() if gradient.requires_grad else gradient
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


_FIRST_BYTES = 2**20  # the first bucket is small, so that communication starts early; as in torch
_SHARE = 32  # of the gradients, in the largest bucket on the CPU ...
_LEAST_BYTES = 2**22  # ... which has at least this size, because each message takes time of the processor


class GradientLayout:
    """The gradient buckets in the order of sending, the same on every rank at any time.

    Parameters used for the first time on any rank get new buckets at the end; `excluded` parameters never get one.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        excluded: Collection[int],
        bucket_cap_mb: float,
        group: dist.ProcessGroup,
    ) -> None:
        self.buckets: list[GradientBucket] = []
        self.bucket_of: list[GradientBucket | None] = [None] * len(parameters)
        self.unassigned = {member for member in range(len(parameters)) if member not in excluded}
        self.excluded = excluded
        self.cap = int(bucket_cap_mb * 2**20)
        if all(parameter.device.type == "cpu" for parameter in parameters):
            # More buckets leave during the backward pass, and gloo does not mind. Gradients that are complete before
            # their bucket exists, in the first step and after an accumulation, are in memory twice for one bucket only.
            self.cap = min(self.cap, max(_LEAST_BYTES, sum(parameter.nbytes for parameter in parameters) // _SHARE))
        self._parameters = parameters
        self._group = group

    def grow(self, used: Sequence[float], order: Sequence[int], source: int) -> list[GradientBucket]:
        """Make and return buckets for parameters used for the first time, in the order of gradients on rank `source`.

        `used` is above 0 for parameters used on any rank; `order` is the order in which gradients came on this rank.
        """
        new = sorted((member for member in self.unassigned if used[member]), reverse=True)
        if not new:
            return []
        # A parameter is complete when its last gradient has come; one that the source did not use goes last.
        last = {member: position for position, member in enumerate(order)}
        positions = torch.tensor([last.get(member, len(order)) for member in new])
        dist.broadcast(positions, group=self._group, group_src=source)
        ordered = [member for _, member in sorted(zip(positions.tolist(), new, strict=True), key=lambda pair: pair[0])]
        begin = len(self.buckets)
        first_cap = None if self.buckets else min(self.cap, _FIRST_BYTES)
        self.append(divide_into_buckets(self._parameters, ordered, self.cap, first_cap))
        return self.buckets[begin:]

    def state(self) -> list[list[int]]:
        """Return the members of each bucket, equal on every rank."""
        return [bucket.members for bucket in self.buckets]

    def append(self, divided: Iterable[Sequence[int]]) -> None:
        """Append a bucket for each sequence of parameters, such as in the `state` of another layout."""
        for members in divided:
            bucket = GradientBucket(len(self.buckets), [self._parameters[member] for member in members], members)
            self.buckets.append(bucket)
            for member in members:
                self.bucket_of[member] = bucket
            self.unassigned.difference_update(members)
        for bucket in self.buckets:
            bucket.last = bucket is self.buckets[-1]

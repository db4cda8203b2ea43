"""A flat buffer for the gradients of several parameters, so that few large messages carry many small ones."""

from collections.abc import Sequence

import torch
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
        room: Elements behind the gradients until `release`; to be set while there is no buffer.
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
        self.room = 0
        self._index = index
        self._large = sum(parameter.numel() >= LARGE for parameter in self.params)
        # Dense memory formats other than the usual one, such as channels last.
        self._strides = {
            position: parameter.stride()
            for position, parameter in enumerate(self.params)
            if not parameter.is_contiguous() and torch.empty_like(parameter).stride() == parameter.stride()
        }
        self._whole: Tensor | None = None
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

    def whole(self) -> Tensor:
        """Return all that travels: the gradients, and what is behind them."""
        self.buffer()
        assert self._whole is not None
        return self._whole

    def behind(self) -> Tensor:
        """Return what travels with the gradients."""
        whole = self.whole()
        return whole[whole.numel() - self.room :]

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
        self._whole = self._flat = None
        self.room = 0
        self._views = []
        self.packed = [False] * len(self.params)
        self.launched = False

    def _allocate(self) -> None:
        first = self.params[0]
        size = sum(parameter.numel() for parameter in self.params)
        self._whole = torch.empty(size + self.room, dtype=first.dtype, device=first.device)
        self._flat = self._whole[:size]
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

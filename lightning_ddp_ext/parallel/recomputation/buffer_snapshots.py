"""What the buffers of a module were when its forward pass began."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import Normalisation, version_of

_Place = tuple[nn.Module, str]


@dataclass(frozen=True, slots=True)
class _Copy:
    """What a buffer was.

    Attributes:
        buffer: The tensor.
        version: Its version; -1 if it changes without counting.
        clone: A clone of it.
    """

    buffer: "weakref.ref[Tensor]"
    version: int
    clone: Tensor

    def is_of(self, buffer: Tensor | None) -> bool:
        """Tell whether a buffer is still the same, as far as is counted."""
        return buffer is not None and self.buffer() is buffer and self.version == version_of(buffer) >= 0


class BufferSnapshot:
    """Context of a recomputation: buffers are what they were when the forward pass began, and change for it alone.

    Without it, batch normalisation would update its running statistics twice in a step, and layers that compute with
    buffers they change, such as spectral normalisation, would compute something else than in the forward pass.

    Args:
        copies: What the buffers were, by their owners and names.
        on_enter: Called when the recomputation begins.
    """

    def __init__(self, copies: Sequence[tuple[_Place, _Copy]], on_enter: Callable[[], None] | None = None) -> None:
        self.copies = copies
        self._on_enter = on_enter
        self._meanwhile: list[tuple[nn.Module, dict[str, Tensor | None]]] = []

    def distrust(self, copies: Sequence[_Copy]) -> None:
        """Take the buffers of these copies for changed, whatever their versions say."""
        distrusted = {id(copy): replace(copy, version=-1) for copy in copies}
        self.copies = [(place, distrusted.get(id(copy), copy)) for place, copy in self.copies]

    def __enter__(self) -> None:
        if self._on_enter is not None:
            self._on_enter()
        changed = [(place, copy) for place, copy in self.copies if not copy.is_of(_buffer(place))]
        owners = {id(owner): owner for (owner, _), _ in changed}
        self._meanwhile = [(owner, dict(owner._buffers)) for owner in owners.values()]
        # Cloned again: with `retain_graph=True` a graph is recomputed more than once. What is shared stays shared.
        clones = {id(copy): copy.clone.clone() for _, copy in changed}
        for (owner, name), copy in changed:
            owner._buffers[name] = clones[id(copy)]

    def __exit__(self, *exception: object) -> None:
        for owner, buffers in self._meanwhile:
            owner._buffers.clear()
            owner._buffers.update(buffers)
        self._meanwhile = []


class BufferSnapshots:
    """Takes a snapshot of a module's buffers before each forward pass; only those that have changed are cloned.

    So buffers may begin to change at any time, and one clone of each is kept. A change is known from the tensor's
    version. Running statistics of normalisation layers, whose changes torch does not count, are cloned for every
    forward pass, and so are buffers that are found to change in the same silent way in the first one in a mode of
    training and evaluation.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: dict[int, _Copy] = {}
        self._silent: set[tuple[int, str]] = set()
        self._known_modes: set[tuple[bool, ...]] = set()

    def take(self, on_enter: Callable[[], None] | None = None) -> BufferSnapshot:
        """Take a snapshot; what `on_enter` is, `BufferSnapshot` says."""
        kept, self._copies = self._copies, {}
        copies = []
        for place in ((owner, name) for owner in self._module.modules() for name in owner._buffers):
            buffer = _buffer(place)
            if buffer is not None:
                if id(buffer) not in self._copies:
                    self._copies[id(buffer)] = self._copy(place, buffer, kept.get(id(buffer)))
                copies.append((place, self._copies[id(buffer)]))
        return BufferSnapshot(copies, on_enter)

    def learn(self, snapshot: BufferSnapshot) -> bool:
        """Find out which buffers change silently, if this has not been done in the current mode.

        Args:
            snapshot: Taken before the forward pass that has ended.

        Returns:
            Whether the forward pass has changed buffers, or might in another mode.
        """
        modes = tuple(part.training for part in self._module.modules())
        counted = [(place, copy) for place, copy in snapshot.copies if copy.is_of(_buffer(place))]
        if modes not in self._known_modes:
            self._known_modes.add(modes)
            found = [(place, copy) for place, copy in counted if _differ(copy.clone, _buffer(place))]
            self._silent.update((id(owner), name) for (owner, name), _ in found)
            snapshot.distrust([copy for _, copy in found])
        return len(counted) < len(snapshot.copies) or bool(self._silent)

    def _copy(self, place: _Place, buffer: Tensor, kept: _Copy | None) -> _Copy:
        owner, name = place
        is_silent = isinstance(owner, Normalisation) or (id(owner), name) in self._silent
        if kept is not None and not is_silent and kept.is_of(buffer):
            return kept
        return _Copy(weakref.ref(buffer), -1 if is_silent else version_of(buffer), buffer.detach().clone())


def _buffer(place: _Place) -> Tensor | None:
    owner, name = place
    return owner._buffers.get(name)


def _differ(before: Tensor, after: Tensor | None) -> bool:
    return after is None or before.shape != after.shape or not torch.equal(before, after)

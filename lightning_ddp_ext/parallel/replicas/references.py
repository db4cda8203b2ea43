"""Pointing a copy of an object graph at the copy's own parts."""

import functools
import types
from collections import OrderedDict
from typing import Any

import torch

_MAX_DEPTH = 4
_MAX_LENGTH = 10_000


class References:
    """What each part of the user's module (the master) is called in one replica.

    Modules keep references to each other outside the module tree: in lists, hooks, bound methods, partial functions and
    closures. A shallow copy of a module would still reach the master through them, so they are rewritten. Everything
    that does not lead to a part of the master is shared: datasets, hyperparameters and the trainer are never copied.

    Args:
        home: Device of the master.
        device: Device of the replica.
    """

    def __init__(self, home: torch.device, device: torch.device) -> None:
        self._home = home
        self._device = device
        # The original is kept beside its counterpart, so that its id is not given to another object.
        self._counterparts: dict[int, tuple[Any, Any]] = {}

    def add(self, original: object, counterpart: object) -> None:
        """Record the replica's counterpart of a part of the master."""
        self._counterparts[id(original)] = (original, counterpart)

    def find(self, original: object) -> Any | None:
        """Return the replica's counterpart of a part of the master, or None if it has none."""
        entry = self._counterparts.get(id(original))
        return None if entry is None else entry[1]

    def rewrite(self, value: Any, depth: int = 0) -> Any:
        """Return `value` with every part of the master in it replaced.

        Containers are followed to a depth of 4; longer ones than 10,000 entries are taken for data and left alone.

        Args:
            value: An attribute of one of the master's modules.
            depth: How many containers the value is nested in.

        Returns:
            The value itself if nothing had to be replaced, otherwise a copy.
        """
        counterpart = self._counterparts.get(id(value))
        if counterpart is not None:
            return counterpart[1]
        if isinstance(value, torch.Tensor):
            moves = value.device == self._home and self._device != self._home
            return value.detach().to(self._device) if moves else value
        if depth == _MAX_DEPTH:
            return value
        return self._rewrite_compound(value, depth + 1)

    def _rewrite_compound(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is types.MethodType:
            owner = self.rewrite(value.__self__, depth)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if kind is types.FunctionType:
            return self._rewrite_closure(value, depth)
        if kind is functools.partial:
            parts = (value.func, value.args, value.keywords)
            function, args, keywords = (self.rewrite(part, depth) for part in parts)
            same = all(new is old for new, old in zip((function, args, keywords), parts, strict=True))
            return value if same else functools.partial(function, *args, **keywords)
        if kind in (list, tuple) and len(value) <= _MAX_LENGTH:
            items = [self.rewrite(item, depth) for item in value]
            return value if all(new is old for new, old in zip(items, value, strict=True)) else kind(items)
        if kind in (dict, OrderedDict) and len(value) <= _MAX_LENGTH:
            entries = {key: self.rewrite(item, depth) for key, item in value.items()}
            return value if all(entries[key] is value[key] for key in value) else kind(entries)
        return value

    def _rewrite_closure(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        cells = function.__closure__ or ()
        # An empty cell belongs to a variable that is assigned later; its ValueError has no other meaning.
        contents = [cell.cell_contents if _is_filled(cell) else None for cell in cells]
        rewritten = [self.rewrite(content, depth) for content in contents]
        if all(new is old for new, old in zip(rewritten, contents, strict=True)):
            return function
        closure = tuple(
            types.CellType(new) if _is_filled(cell) else cell for new, cell in zip(rewritten, cells, strict=True)
        )
        copy = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        copy.__dict__.update(function.__dict__)
        return copy


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True

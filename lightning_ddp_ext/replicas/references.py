"""The objects by which parts of a module refer to each other outside of the module tree, rewritten for a replica."""

import copy
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_ext._compat.lightning import REPLICA_ATTRIBUTES
from lightning_ddp_ext._compat.torch import HOOKS, are_identical

_DICTIONARIES = (dict, OrderedDict, defaultdict, Counter)
# Of these a replica may have a copy, which is filled before every step. Lists are merged after it instead.
COPIED = (*_DICTIONARIES, set, deque)
_CONTAINERS = (*COPIED, list, tuple, frozenset)

_MAX_DEPTH = 4
_MAX_LENGTH = 10_000
_MAX_ENTRIES = 1_000
# Dictionaries of torch that replicas share. Dictionaries of hooks are copied: a hook that a step registers on a replica
# must not run on another replica.
_SHARED = (REPLICA_ATTRIBUTES | vars(nn.Module()).keys()).difference(HOOKS)


def entries_of(value: Any, depth: int = _MAX_DEPTH) -> Iterator[Any]:
    """Yield the keys and items of nested containers."""
    if not depth or type(value) not in _CONTAINERS:
        yield value
        return
    if type(value) in _DICTIONARIES:
        yield from value
    for item in _items(value):
        yield from entries_of(item, depth - 1)


def _items(container: Any) -> Collection[Any]:
    items: Collection[Any] = container.values() if type(container) in _DICTIONARIES else container
    return items


class References:
    """Maps each part of the user's module (the master) to its counterpart in one replica.

    Modules refer to each other outside the module tree: in containers, hooks, bound methods, partial functions,
    closures and defaults of arguments. These are rewritten, so that a replica does not reach the master by them.
    Everything else is shared, such as keys of dictionaries, and objects of other classes that hold modules.
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

    def add_copy(self, name: str, value: Any) -> None:
        """Give the replica a copy of a dictionary, or of a set or deque that leads to parts of the master.

        Containers of more than 1,000 entries, nested entries included, are shared.
        """
        if type(value) not in COPIED or name in _SHARED or self.find(value) is not None:
            return
        is_copied = type(value) in _DICTIONARIES or self.rewrite(value) is not value
        if is_copied and len([*islice(entries_of(value), _MAX_ENTRIES + 1)]) <= _MAX_ENTRIES:
            self.add(value, copy.copy(value))  # a copy keeps the factory of a defaultdict

    def fill_copy(self, source: Any) -> None:
        """Give the replica's copy of a container, if it has one, the master's items; nested ones are copied too."""
        if type(source) not in COPIED or (own := self.find(source)) is None:
            return
        items = [self.rewrite(item, 1, copies=True) for item in _items(source)]
        own.clear()
        if isinstance(own, dict):
            own.update(zip(source, items, strict=True))
        else:
            own.extend(items) if isinstance(own, deque) else own.update(items)

    def forget_copy(self, value: Any) -> None:
        """Forget the replica's copy of a container that the master no longer holds."""
        if type(value) in COPIED:
            self._counterparts.pop(id(value), None)

    def rewrite(self, value: Any, depth: int = 0, copies: bool = False) -> Any:
        """Return `value` itself, or a copy with every part of the master in it replaced.

        Containers are followed to a depth of 4, and copied in any case with `copies`; containers of more than 10,000
        entries are taken for data.
        """
        counterpart = self._counterparts.get(id(value))
        if counterpart is not None:
            return counterpart[1]
        if isinstance(value, Tensor):
            moves = value.device == self._home and self._device != self._home
            return value.detach().to(self._device) if moves else value
        if depth == _MAX_DEPTH:
            return value
        depth += 1
        kind = type(value)
        if kind is types.MethodType:
            owner = self.rewrite(value.__self__, depth)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if kind is types.FunctionType:
            return self._rewrite_function(value, depth)
        if kind is partial:
            parts = (value.func, value.args, value.keywords)
            function, args, keywords = rewritten = [self.rewrite(part, depth) for part in parts]
            return value if are_identical(rewritten, parts) else partial(function, *args, **keywords)
        if kind in _CONTAINERS and len(value) <= _MAX_LENGTH:
            return self._rewrite_container(value, depth, copies)
        return value

    def _rewrite_container(self, value: Any, depth: int, copies: bool) -> Any:
        kind, items = type(value), _items(value)
        # Steps may add tensors to a set or deque, which replicas share if it holds nothing but data.
        is_shared = kind in (set, deque) and not copies
        rewritten = [
            item
            if is_shared and isinstance(item, Tensor) and self.find(item) is None
            else self.rewrite(item, depth, copies)
            for item in items
        ]
        if not copies and are_identical(rewritten, items):
            return value
        if kind in _DICTIONARIES:
            own = copy.copy(value)
            dict.update(own, zip(value, rewritten, strict=True))  # the method of a Counter adds
            return own
        return deque(rewritten, value.maxlen) if kind is deque else kind(rewritten)

    def _rewrite_function(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        cells = function.__closure__ or ()
        closure = tuple(self._rewrite_cell(cell, depth) for cell in cells)
        before = (function.__defaults__, function.__kwdefaults__)
        after = [self.rewrite(values, depth - 1) for values in before]
        if are_identical((*closure, *after), (*cells, *before)):
            return function
        rewritten = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, after[0], closure or None
        )
        rewritten.__kwdefaults__ = after[1]
        rewritten.__dict__.update(function.__dict__)
        return rewritten

    def _rewrite_cell(self, cell: types.CellType, depth: int) -> types.CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # an empty cell, of a variable that is assigned later
            return cell
        rewritten = self.rewrite(content, depth)
        return cell if rewritten is content else types.CellType(rewritten)

"""The objects by which parts of a module refer to each other outside of the module tree, rewritten for a replica."""

import copy
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext._compat.torch import are_identical

_DICTIONARIES = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (*_DICTIONARIES, list, set, deque, tuple, frozenset)
COPIED = (*_CONTAINERS, partial)  # types of attributes of which a replica may have a copy, made before every step
_MAX_LENGTH = 1_000


def _held_by(value: Any) -> list[Any]:
    """Return the objects that a container, a partial function, a method or a function holds."""
    kind = type(value)
    if kind in _CONTAINERS and len(value) <= _MAX_LENGTH:
        return [*value, *(value.values() if kind in _DICTIONARIES else ())]
    if kind is partial:
        return [value.func, *value.args, *value.keywords.values()]
    if kind is types.MethodType:
        return [value.__self__]
    held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()] if _is_function(value) else []
    for cell in value.__closure__ or () if _is_function(value) else ():
        with suppress(ValueError):  # an empty cell, of a variable that is assigned later
            held.append(cell.cell_contents)
    return held


def _is_function(value: Any) -> bool:
    return type(value) is types.FunctionType


def _is_torchs(function: Any) -> bool:
    # `torch.compile` makes functions that call a method of the module; the options are in the closure, too.
    return _is_function(function) and str(function.__globals__.get("__name__")).startswith("torch.")


def walk_references(value: Any, path: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield an object and those that it holds, at any depth; `path` keeps circles from being followed."""
    yield value
    if id(value) not in path:
        for held in _held_by(value):
            yield from walk_references(held, (*path, id(value)))


def find_hiding_function(value: Any, is_own: Callable[[Any], bool]) -> types.FunctionType | None:
    """Return a function that holds an object of which each replica has its own, in a closure or a default."""
    for function in filter(_is_function, walk_references(value)):
        if not _is_torchs(function) and any(map(is_own, walk_references(function))):
            return function  # type: ignore[no-any-return]
    return None


class References:
    """Maps each part of the user's module (the master) to its counterpart in one replica.

    Modules refer to each other outside the module tree: in containers, hooks, bound methods and partial functions.
    These are rewritten, so that a replica does not reach the master by them. Everything else is shared, such as keys
    of dictionaries, functions, and objects of other classes that hold modules.
    """

    def __init__(self, home: torch.device, device: torch.device) -> None:
        self._home = home
        self._device = device
        # The original is kept beside its counterpart, so that its id is not given to another object.
        self._counterparts: dict[int, tuple[Any, Any]] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}  # of containers, for one step

    def add(self, original: object, counterpart: object) -> None:
        """Record the replica's counterpart of a part of the master."""
        self._counterparts[id(original)] = (original, counterpart)

    def find(self, original: object) -> Any | None:
        """Return the replica's counterpart of a part of the master, or None if it has none."""
        entry = self._counterparts.get(id(original))
        return None if entry is None else entry[1]

    def forget_copies(self) -> None:
        """Copy containers again from now on; until then, a container in two places has one copy."""
        self._copies.clear()

    def rewrite(self, value: Any) -> Any:
        """Return `value`, or a copy with every part of the master replaced: of a dictionary, list, set or deque always.

        Containers of more than 1,000 entries are taken for data.
        """
        entry = self._counterparts.get(id(value)) or self._copies.get(id(value))
        if entry is not None:
            return entry[1]
        kind = type(value)
        if isinstance(value, Tensor):
            return value.detach().to(self._device) if self._moves(value) else value
        if kind is types.MethodType:
            owner = self.rewrite(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if kind is partial:
            keywords = {name: self._rewrite_argument(item) for name, item in value.keywords.items()}
            return partial(self.rewrite(value.func), *map(self._rewrite_argument, value.args), **keywords)
        if _is_torchs(value) and self._holds_own(value):
            return self._rewrite_function(value)
        if kind not in _CONTAINERS or len(value) > _MAX_LENGTH:
            return value
        if kind in (tuple, frozenset):
            items = [*map(self.rewrite, value)]
            return value if are_identical(items, value) else kind(items)
        own = copy.copy(value)  # keeps the factory of a defaultdict, and the length of a deque
        self._copies[id(value)] = (value, own)
        items = [*map(self.rewrite, value.values() if kind in _DICTIONARIES else value)]
        if kind in _DICTIONARIES:
            dict.update(own, zip(value, items, strict=True))  # the method of a Counter adds
        else:
            own.clear()
            own.update(items) if kind is set else own.extend(items)
        return own

    def _rewrite_argument(self, value: Any) -> Any:
        is_shared = type(value) in _CONTAINERS and id(value) not in self._copies and not self._holds_own(value)
        return value if is_shared else self.rewrite(value)

    def _rewrite_function(self, function: types.FunctionType) -> types.FunctionType:
        closure = tuple(types.CellType() for _ in function.__closure__ or ())
        own = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
        own.__dict__.update(function.__dict__)
        self._copies[id(function)] = (function, own)
        for cell, original in zip(closure, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                cell.cell_contents = self.rewrite(original.cell_contents)
        return own

    def _moves(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device == self._home and self._device != self._home

    def _holds_own(self, value: Any) -> bool:
        return any(self.find(one) is not None or self._moves(one) for one in walk_references(value))

    def is_data(self, value: Any) -> bool:
        """Return True for a list, and for containers of more than 1,000 entries, of which no entry is replaced."""
        is_long = type(value) is list or len([*islice(walk_references(value), _MAX_LENGTH + 1)]) > _MAX_LENGTH
        return is_long and not self._holds_own(value)

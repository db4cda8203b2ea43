"""The objects by which parts of a module refer to each other outside of the module tree, rewritten for a replica."""

import copy
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import are_identical
from lightning_ddp_ext.errors import UnsupportedFeatureError

_DICTIONARIES = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (*_DICTIONARIES, list, set, deque, tuple, frozenset)
COPIED = (*_CONTAINERS, partial)  # types of attributes of which a replica may have a copy, made before every step
_MAX_LENGTH = 1_000


def _items(container: Any) -> Collection[Any]:
    items: Collection[Any] = container.values() if type(container) in _DICTIONARIES else container
    return items


def entries_of(value: Any, path: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield the keys and items of nested containers, which `path` keeps from being followed in a circle."""
    if type(value) not in _CONTAINERS or len(value) > _MAX_LENGTH or id(value) in path:
        yield value
        return
    if type(value) in _DICTIONARIES:
        yield from value
    for item in _items(value):
        yield from entries_of(item, (*path, id(value)))


def _held_by(function: types.FunctionType) -> list[Any]:
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell, of a variable that is assigned later
            held.append(cell.cell_contents)
    return held


class References:
    """Maps each part of the user's module (the master) to its counterpart in one replica.

    Modules refer to each other outside the module tree: in containers, hooks, bound methods and partial functions.
    These are rewritten, so that a replica does not reach the master by them; functions that hold parts of the module
    are refused. Everything else is shared, such as keys of dictionaries, and objects of other classes that hold
    modules.
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
        if kind is types.FunctionType:
            return self._rewrite_function(value)
        if kind not in _CONTAINERS or len(value) > _MAX_LENGTH:
            return value
        if kind in (tuple, frozenset):
            items = [*map(self.rewrite, value)]
            return value if are_identical(items, value) else kind(items)
        own = copy.copy(value)  # keeps the factory of a defaultdict, and the length of a deque
        self._copies[id(value)] = (value, own)
        items = [*map(self.rewrite, _items(value))]
        if kind in _DICTIONARIES:
            dict.update(own, zip(value, items, strict=True))  # the method of a Counter adds
        else:
            own.clear()
            own.update(items) if kind is set else own.extend(items)
        return own

    def _rewrite_argument(self, value: Any) -> Any:
        is_shared = type(value) in _CONTAINERS and id(value) not in self._copies and not self._holds_own(value)
        return value if is_shared else self.rewrite(value)

    def _moves(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device == self._home and self._device != self._home

    def _holds_own(self, value: Any) -> bool:
        return self.leads_to_part(value) or any(map(self._moves, entries_of(value)))

    def is_data(self, value: Any) -> bool:
        """Return True for a list, and for containers of more than 1,000 entries, of which no entry is replaced."""
        is_long = type(value) is list or len([*islice(entries_of(value), _MAX_LENGTH + 1)]) > _MAX_LENGTH
        return is_long and not self._holds_own(value)

    def leads_to_part(self, value: Any, path: tuple[int, ...] = ()) -> bool:
        """Return True for a part of the master, and for a container, function or method that leads to one."""
        if self.find(value) is not None:
            return True
        held: Collection[Any] = ()
        if isinstance(value, partial):
            held = (value.func, value.args, value.keywords)
        elif isinstance(value, types.MethodType):
            held = (value.__self__,)
        elif isinstance(value, types.FunctionType):
            held = _held_by(value)
        elif type(value) in _CONTAINERS and len(value) <= _MAX_LENGTH:
            held = _items(value)
        return id(value) not in path and any(self.leads_to_part(one, (*path, id(value))) for one in held)

    def _rewrite_function(self, function: types.FunctionType) -> types.FunctionType:
        if not (self.leads_to_part(function) or any(map(self._is_attribute, _held_by(function)))):
            return function
        if not str(function.__globals__.get("__name__")).startswith("torch."):
            code = function.__code__
            raise UnsupportedFeatureError(
                f"the function `{function.__qualname__}` ({code.co_filename}, line {code.co_firstlineno}), an attribute"
                " or hook of the module, holds a part of the module, or one of its dictionaries, in its closure or in a"
                " default of an argument: under `balanced_dp`, all replicas would use it. Use a method of the module"
                " instead, or pass it with `functools.partial`."
            )
        # `torch.compile` makes functions that call a method of the module; the options are in the closure, too.
        closure = tuple(types.CellType() for _ in function.__closure__ or ())
        own = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
        own.__dict__.update(function.__dict__)
        self._copies[id(function)] = (function, own)
        for cell, original in zip(closure, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                cell.cell_contents = self.rewrite(original.cell_contents)
        return own

    def _is_attribute(self, value: Any) -> bool:
        """Return True for a dictionary, set or deque of the master, of which every replica has a copy."""
        if type(value) not in (*_DICTIONARIES, set, deque):
            return False
        modules = (part for part, _ in self._counterparts.values() if isinstance(part, nn.Module))
        return any(attribute is value for module in modules for attribute in vars(module).values())

"""Dictionaries on modules: each replica reads and writes one of its own."""

import copy
import operator
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning_ddp_ext._compat.torch import HOOKS
from lightning_ddp_ext.parallel.batches.containers import to_device
from lightning_ddp_ext.parallel.replicas.replicas import Replicas

MISSING = object()
_KINDS = (dict, OrderedDict, defaultdict, Counter)
_LONGEST = 1_000

Place = tuple[int, str]  # position of a module in the tree, and name of its attribute
Combine = Callable[[Any, Any, list[Any], list[int]], Any]


class DictionaryMirror:
    """Gives each replica a dictionary of its own for every dictionary on the master's modules.

    A step that reads the features which a forward hook has stored under a key must not find those of another replica.
    What changes on the master between steps reaches every replica. After a step new entries come back, lists under a
    key are extended in the order of the replicas, counters are added up, and values that replicas have in common are
    set. Of other values the first replica's is seen on the master, and each replica keeps its own until the master's
    changes. Dictionaries of more than 1,000 entries are shared.

    Args:
        replicas: The replicas, just built.
        combine: Makes one value of those of the replicas, given a name for it, the value before, theirs, and the chunk
            sizes; MISSING if they have nothing in common.
        warn: Told where the first replica's value stands for different ones.
    """

    def __init__(self, replicas: Replicas, combine: Combine, warn: Callable[[Place], None]) -> None:
        self._replicas = replicas
        self._combine = combine
        self._warn = warn
        self._shelves: dict[Place, _Shelf] = {}

    def find(self, places: Sequence[Place], built: bool = False) -> None:
        """Look for dictionaries again after attributes have changed.

        Args:
            places: The attributes to look at.
            built: Whether the replicas are new: hooks may then hold a dictionary of the master directly.
        """
        found: dict[Place, _Shelf] = {}
        for position, name in places:
            pairs = [replica.modules[position] for replica in self._replicas]
            source: Any = pairs[0][0].__dict__.get(name)
            first: Any = pairs[0][1].__dict__.get(name)
            known = self._shelves.get((position, name))
            if known is not None and known.source is source and known.own[0] is first:
                found[position, name] = known
            elif first is source and type(source) in _KINDS and len(source) <= _LONGEST:
                shelf = found[position, name] = _Shelf(source, len(pairs))
                for (_, part), own in zip(pairs, shelf.own, strict=True):
                    part.__dict__[name] = own
        self._shelves = found
        if built and found:
            self._redirect_hooks()

    def _redirect_hooks(self) -> None:
        for index, replica in enumerate(self._replicas):
            for shelf in self._shelves.values():
                replica.references.add(shelf.source, shelf.own[index])
            for module, part in replica.modules:
                part.__dict__.update({name: replica.references.rewrite(module.__dict__[name]) for name in HOOKS})

    def lend(self, active: Sequence[int]) -> None:
        """Bring what has changed on the master to the replicas that are about to run."""
        for shelf in self._shelves.values():
            for index in active:
                shelf.fetch(index, self._replicas[index].references.rewrite)

    def collect(self, active: Sequence[int], sizes: Sequence[int]) -> None:
        """Bring back what replicas have written since they were lent to, or since the last call.

        Args:
            active: Indices of the replicas that ran, in order.
            sizes: Number of samples of each of them.
        """
        for place, shelf in self._shelves.items():
            written: dict[Any, dict[int, Any]] = {}
            for index in active:
                for key, value in shelf.written(index):
                    written.setdefault(key, {})[index] = value
            for key, values in written.items():
                self._write(place, shelf, key, values, list(sizes))

    def _write(self, place: Place, shelf: "_Shelf", key: Any, values: dict[int, Any], sizes: list[int]) -> None:
        source, home = shelf.source, self._replicas[0].device
        given = list(values.values())
        if all(isinstance(value, _Appended) for value in given):
            source.setdefault(key, []).extend(to_device(item, home) for value in given for item in value.items)
            return
        before = source.get(key, 0 if type(source) is Counter else MISSING)
        if type(source) is Counter and MISSING not in given:
            source[key] = before + sum(value - before for value in given)
            return
        value = self._combine((place, key), before, given, sizes)
        if value is not MISSING:
            source[key] = value
        elif given[0] is MISSING:
            source.pop(key, None)
        else:
            source[key] = to_device(given[0], home)
            for index in values:
                shelf.keep(index, key)
            if len(given) > 1:
                self._warn(place)


class _Appended:
    """What a step has appended to a list in a dictionary."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class _Shelf:
    """One dictionary of the master's, and the replicas' own."""

    def __init__(self, source: dict[Any, Any], replicas: int) -> None:
        self.source = source
        self.own = [copy.copy(source) for _ in range(replicas)]  # a copy, for the factory of a default dictionary
        self._fetched: list[dict[Any, Any]] = [{} for _ in self.own]  # the master's values behind the replica's
        self._known: list[dict[Any, Any]] = [{} for _ in self.own]  # the replica's values that are no news
        self._lengths: list[dict[Any, int]] = [{} for _ in self.own]
        for own in self.own:
            own.clear()

    def fetch(self, index: int, rewrite: Callable[[Any], Any]) -> None:
        own, fetched = self.own[index], self._fetched[index]
        if not _identical(self.source, fetched):
            for key in [key for key in fetched if key not in self.source]:
                own.pop(key, None)
            for key, value in self.source.items():
                if value is not fetched.get(key, MISSING):
                    own[key] = rewrite(value)
            self._fetched[index] = dict(self.source)
        for key, value in self.source.items():
            if type(value) is list:
                own[key] = list(value)
        self._note(index)

    def _note(self, index: int) -> None:
        self._known[index] = dict(self.own[index])
        self._lengths[index] = {key: len(value) for key, value in self.own[index].items() if type(value) is list}

    def written(self, index: int) -> Iterator[tuple[Any, Any]]:
        own, known, lengths = self.own[index], self._known[index], self._lengths[index]
        if not lengths and _identical(own, known):
            return
        for key in {**known, **own}:
            value, old = own.get(key, MISSING), known.get(key, MISSING)
            length = lengths.get(key, 0)
            if type(value) is list and (old is value or old is MISSING) and len(value) >= length:
                if len(value) > length or old is MISSING:
                    yield key, _Appended(value[length:])
            elif value is not old:
                yield key, value
        self._note(index)

    def keep(self, index: int, key: Any) -> None:
        """Leave a replica the value that it has written, although the master now has another one."""
        self._fetched[index][key] = self.source[key]


def _identical(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(map(operator.is_, one.values(), map(other.get, one)))

"""Plain attributes that steps of replicas change."""

import copy
import operator
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_ddp_ext._compat.torch import HOOKS, STRUCTURE
from lightning_ddp_ext.batches.containers import to_device
from lightning_ddp_ext.replicas.replica import Replica, Replicas


class SampleCounters:
    """Recognises counters that each replica has raised by the number of its samples, and that are to be added up.

    With chunks of one sample, a counter of samples looks like one of steps: it is one if it has been before.
    """

    def __init__(self) -> None:
        self._known: set[Hashable] = set()

    def recognise(self, key: Hashable, raised: Sequence[float], sizes: Sequence[int]) -> bool:
        """Tell whether a number counts samples.

        Args:
            key: Names the number.
            raised: By how much each replica has raised it.
            sizes: Samples of each of them.
        """
        if list(raised) != list(sizes) or (set(sizes) == {1} and key not in self._known):
            return False
        self._known.add(key)
        return True


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
        self._mirrors: dict[Place, DictMirror] = {}

    def find(self, places: Sequence[Place], built: bool = False) -> None:
        """Look for dictionaries again after attributes have changed.

        Args:
            places: The attributes to look at.
            built: Whether the replicas are new: hooks may then hold a dictionary of the master directly.
        """
        found: dict[Place, DictMirror] = {}
        for position, name in places:
            pairs = [replica.modules[position] for replica in self._replicas]
            source: Any = pairs[0][0].__dict__.get(name)
            first: Any = pairs[0][1].__dict__.get(name)
            known = self._mirrors.get((position, name))
            if known is not None and known.source is source and known.own[0] is first:
                found[position, name] = known
            elif first is source and type(source) in _KINDS and len(source) <= _LONGEST:
                mirror = found[position, name] = DictMirror(source, len(pairs))
                for (_, part), own in zip(pairs, mirror.own, strict=True):
                    part.__dict__[name] = own
        self._mirrors = found
        if built and found:
            self._redirect_hooks()

    def _redirect_hooks(self) -> None:
        for index, replica in enumerate(self._replicas):
            for mirror in self._mirrors.values():
                replica.references.add(mirror.source, mirror.own[index])
            for module, part in replica.modules:
                part.__dict__.update({name: replica.references.rewrite(module.__dict__[name]) for name in HOOKS})

    def lend(self, active: Sequence[int]) -> None:
        """Bring what has changed on the master to the replicas that are about to run."""
        for mirror in self._mirrors.values():
            for index in active:
                mirror.fetch(index, self._replicas[index].references.rewrite)

    def collect(self, active: Sequence[int], sizes: Sequence[int]) -> None:
        """Bring back what replicas have written since they were lent to, or since the last call.

        Args:
            active: Indices of the replicas that ran, in order.
            sizes: Number of samples of each of them.
        """
        for place, mirror in self._mirrors.items():
            written: dict[Any, dict[int, Any]] = {}
            for index in active:
                for key, value in mirror.written(index):
                    written.setdefault(key, {})[index] = value
            for key, values in written.items():
                self._write(place, mirror, key, values, list(sizes))

    def _write(self, place: Place, mirror: "DictMirror", key: Any, values: dict[int, Any], sizes: list[int]) -> None:
        source, home = mirror.source, self._replicas[0].device
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
                mirror.keep(index, key)
            if len(given) > 1:
                self._warn(place)


class _Appended:
    """What a step has appended to a list in a dictionary."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class DictMirror:
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
        """Copy the master's entries to a replica."""
        own, fetched = self.own[index], self._fetched[index]
        if not _identical_entries(self.source, fetched):
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
        """Yield the entries that a replica has changed."""
        own, known, lengths = self.own[index], self._known[index], self._lengths[index]
        if not lengths and _identical_entries(own, known):
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


def _identical_entries(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(map(operator.is_, one.values(), map(other.get, one)))


_SCALARS = (int, float, str, bool, bytes, type(None), torch.dtype)
_LONGEST_LIST = 10_000
_TORCHS_OWN = frozenset(vars(nn.Module()))


class AttributeMirror:
    """Keeps the attributes of replicas equal to the master's.

    What the user sets on the module between steps reaches every replica. What a step does to the attributes of its
    module comes back where it can: entries appended to lists, in the order of the replicas; counters of samples, added
    up; other scalars that every replica set to the same value. Anything else stays with its replica; the first one's is
    seen on the master, and a warning names it once. Lists of more than 10,000 entries are shared instead: what is
    appended is in no particular order. Sets are shared always; for dictionaries see `DictionaryMirror`.

    Args:
        replicas: The replicas, just built.
        own: Names of attributes that replicas have values of their own for.
    """

    def __init__(self, replicas: Replicas, own: Set[str] = frozenset()) -> None:
        self._replicas = replicas
        self._own = own | STRUCTURE | {"forward"}
        self._names = [f"{name}." if name else "" for name in _names_of(replicas)]
        self._modules = [module for module, _ in replicas[0].modules]
        self._seen = [dict(module.__dict__) for module in self._modules]
        self._lists = self._find_lists()
        # Containers that were copied to be rewritten do not follow changes in place: rewrite them before every step.
        self._copied = {
            (position, name)
            for position, (module, copy) in enumerate(replicas[0].modules)
            for name, value in module.__dict__.items()
            if name not in self._own and isinstance(value, list | dict) and copy.__dict__[name] is not value
        }
        self._hooks = self._count_hooks()
        self._moved = self._find_moved()
        self._lent: dict[int, list[dict[str, Any]]] = {}
        self._copies_of: dict[tuple[int, Place], list[Any]] = {}
        self._sample_counters = SampleCounters()
        self._warned: set[Place] = set()
        self._dictionaries = DictionaryMirror(replicas, self._combine, self._warn_of_entries)
        self._dictionaries.find(self._find_dictionaries(), built=True)

    def push(self) -> None:
        """Bring attributes that changed on the master since the last call to every replica."""
        changed = set(self._copied)
        if not _identical([module.__dict__ for module in self._modules], self._seen):
            for position, module in enumerate(self._modules):
                changed.update(
                    (position, name)
                    for name in _changed(self._seen[position], module.__dict__)
                    if name not in self._own
                )
                self._seen[position] = dict(module.__dict__)
        changed.update(self._grown_hooks())
        changed.update(place for place, version in self._moved.items() if self._version(place) != version)
        for replica in self._replicas:
            for place in changed:
                self._push_one(replica, place)
        if len(changed) > len(self._copied):
            self._moved = self._find_moved()
            self._lists = self._find_lists()
            self._dictionaries.find(self._find_dictionaries())

    def _grown_hooks(self) -> set[Place]:
        """Find dictionaries of hooks that have got or lost entries: what they hold may lead back to the master."""
        counts, self._hooks = self._hooks, self._count_hooks()
        if counts == self._hooks:
            return set()
        places = [(position, name) for position in range(len(self._modules)) for name in HOOKS]
        grown = {place for place, before, now in zip(places, counts, self._hooks, strict=True) if now != before}
        self._copied |= grown
        return grown

    def _count_hooks(self) -> list[int]:
        return [len(module.__dict__[name]) for module in self._modules for name in HOOKS]

    def _push_one(self, replica: Replica, place: Place) -> None:
        position, name = place
        module, copy = replica.modules[position]
        if name in module.__dict__:
            copy.__dict__[name] = replica.references.rewrite(module.__dict__[name])
        else:
            copy.__dict__.pop(name, None)

    def _find_moved(self) -> dict[Place, int]:
        """Find plain tensors that replicas on other devices have copies of, which do not follow changes in place."""
        home = self._replicas[0].device
        if all(replica.device == home for replica in self._replicas):
            return {}
        return {
            (position, name): self._version((position, name))
            for position, module in enumerate(self._modules)
            for name, value in module.__dict__.items()
            if isinstance(value, torch.Tensor) and name not in self._own and not value.is_inference()
        }

    def _version(self, place: Place) -> int:
        value = self._modules[place[0]].__dict__.get(place[1])
        return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else -1

    def _find_lists(self) -> list[Place]:
        return [
            (position, name)
            for position, module in enumerate(self._modules)
            for name, value in module.__dict__.items()
            if type(value) is list and self._is_users(position, name)
        ]

    def _find_dictionaries(self) -> list[Place]:
        return [
            (position, name)
            for position, module in enumerate(self._modules)
            for name, value in module.__dict__.items()
            if isinstance(value, dict) and name not in self._own | _TORCHS_OWN and (position, name) not in self._copied
        ]

    def _is_users(self, position: int, name: str) -> bool:
        """Tell attributes that a person may want back from what libraries keep for themselves below the root."""
        return name not in self._own and (position == 0 or not name.startswith("_"))

    def lend(self, active: Sequence[int]) -> None:
        """Give each replica that is about to run its own copy of the master's lists and dictionaries."""
        self._dictionaries.lend(active)
        for index in active:
            modules = self._replicas[index].modules
            for position, name in self._lists:
                attributes = modules[position][1].__dict__
                self._copies_of[index, (position, name)] = attributes[name]
                if len(attributes[name]) <= _LONGEST_LIST:
                    attributes[name] = list(attributes[name])
            self._lent[index] = [copy.__dict__.copy() for _, copy in modules]

    def collect(self, active: Sequence[int], sizes: Sequence[int]) -> None:
        """Bring back to the master what the step did to the attributes of the replicas.

        Args:
            active: Indices of the replicas that ran, in order.
            sizes: Number of samples of each of them.
        """
        rebound = self._find_rebound(active)
        for place in self._lists:
            self._collect_list(active, place)
        for place, values in rebound.items():
            self._collect_rebound(place, values, list(sizes))
        self.collect_responses(active, sizes)
        self._moved = {place: self._version(place) for place in self._moved}  # what a step has changed stays there
        self._lent.clear()
        self._copies_of.clear()

    def collect_responses(self, active: Sequence[int], sizes: Sequence[int]) -> None:
        """Bring back what has been written to dictionaries since, as by hooks that run in the backward pass."""
        self._dictionaries.collect(active, sizes)

    def _find_rebound(self, active: Sequence[int]) -> dict[Place, list[Any]]:
        """Find the attributes, other than lists, that the step has set, with the values of the replicas that did."""
        rebound: dict[Place, list[Any]] = {}
        for index in active:
            lent = self._lent[index]
            now = [copy.__dict__ for _, copy in self._replicas[index].modules]
            if _identical(now, lent):
                continue
            for position, (before, after) in enumerate(zip(lent, now, strict=True)):
                for name in _changed(before, after):
                    if (position, name) not in self._lists and self._is_users(position, name):
                        rebound.setdefault((position, name), []).append(after.get(name, MISSING))
        return rebound

    def _collect_list(self, active: Sequence[int], place: Place) -> None:
        position, name = place
        original = self._modules[position].__dict__[name]
        length = len(original)
        for index in active:
            replica = self._replicas[index]
            attributes = replica.modules[position][1].__dict__
            lent = self._lent[index][position][name]
            if attributes.get(name) is lent and lent is not original:
                kept = len(lent) >= length and all(map(operator.is_, lent, self._copies_of[index, place][:length]))
                if kept:
                    original.extend(to_device(lent[length:], self._replicas[0].device))
                else:
                    self._warn(place, "was changed inside a step other than by appending")
            elif attributes.get(name) is not lent:
                self._warn(place, "was set inside a step to a list of its own on each replica")
        for index in active:
            replica = self._replicas[index]
            replica.modules[position][1].__dict__[name] = replica.references.rewrite(original)

    def _collect_rebound(self, place: Place, values: list[Any], sizes: list[int]) -> None:
        position, name = place
        master = self._modules[position]
        value = self._combine(place, master.__dict__.get(name), values, sizes)
        if value is not MISSING and not isinstance(value, torch.Tensor):
            setattr(master, name, value)
            return
        # The first replica's value stands for all, so that setting the attribute back in a hook is seen as a change.
        if values[0] is not MISSING:
            master.__dict__[name] = to_device(values[0], self._replicas[0].device)
            self._seen[position] = dict(master.__dict__)
        if value is MISSING:
            self._warn(place, "was set inside a step, to a value of its own on each replica")

    def _combine(self, key: Any, before: Any, values: list[Any], sizes: list[int]) -> Any:
        """Make one value of those that all replicas have set; MISSING if they have nothing in common."""
        if len(values) < len(sizes):
            return MISSING
        if all(isinstance(value, _SCALARS) for value in values):
            if _is_count(before) and all(map(_is_count, values)):
                raised = [value - before for value in values]
                if self._sample_counters.recognise(key, raised, sizes):
                    return before + sum(raised)
            if all(type(value) is type(values[0]) and value == values[0] for value in values):
                return values[0]
        # Comparing tensors may wait for a device: it ends with the warning that they differ.
        warned = key in self._warned or key[0] in self._warned
        return values[0] if len(values) > 1 and not warned and _are_equal(values) else MISSING

    def _warn_of_entries(self, place: Place) -> None:
        if self._is_users(*place):
            self._warn(place, "got entries inside a step, of a value of their own on each replica")

    def _warn(self, place: Place, what: str) -> None:
        if place in self._warned:
            return
        self._warned.add(place)
        warnings.warn(
            f"`self.{self._names[place[0]]}{place[1]}` {what}; only the first replica's is seen on the module itself."
            " Set it in a hook such as `on_train_batch_end`, append to a list, or use a metric.",
            stacklevel=2,
        )


def _identical(dictionaries: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> bool:
    """Tell whether all values are the same objects; one pass for all modules, because this runs in every step."""
    values = [*chain.from_iterable(map(dict.values, dictionaries))]
    other_values = [*chain.from_iterable(map(dict.values, others))]
    return len(values) == len(other_values) and all(map(operator.is_, values, other_values))


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = {**before, **after}
    return [name for name in names if after.get(name, MISSING) is not before.get(name, MISSING)]


def _are_equal(values: Sequence[Any]) -> bool:
    """Tell whether replicas have computed the same tensor, as from parameters alone (weight normalisation by hooks)."""
    first = values[0]
    return isinstance(first, torch.Tensor) and all(
        isinstance(value, torch.Tensor) and value.dtype == first.dtype and torch.equal(value.to(first.device), first)
        for value in values
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _names_of(replicas: Replicas) -> list[str]:
    names: dict[int, str] = {id(module): name for name, module in replicas.master.named_modules()}
    modules: list[nn.Module] = [module for module, _ in replicas[0].modules]
    return [names[id(module)] for module in modules]

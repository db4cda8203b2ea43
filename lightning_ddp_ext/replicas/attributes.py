"""Plain attributes of the module: from the module to its replicas before a step, and back after it."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from lightning_utilities.core.rank_zero import WarningCache

from lightning_ddp_ext._compat.lightning import REPLICA_ATTRIBUTES
from lightning_ddp_ext._compat.torch import HOOKS, STRUCTURE, TensorVersions, are_identical
from lightning_ddp_ext.batches.containers import to_device
from lightning_ddp_ext.batches.weights import SampleCounters
from lightning_ddp_ext.replicas.references import COPIED, entries_of
from lightning_ddp_ext.replicas.replica import Place, Replica, Replicas

_MISSING = object()
_SCALARS = (int, float, str, bool, bytes, type(None), torch.dtype)
_LONGEST_LIST = 10_000
_FIRST = "; only the first replica's is seen on the module itself"
_NOT_MIRRORED = STRUCTURE | REPLICA_ATTRIBUTES | {"forward"}


class AttributeMirror:
    """Pushes the master's attributes to the replicas before a step, and merges the step's changes into the master.

    New items of lists, counters of samples and equal scalars are merged. Any other value stays with its replica until
    the master's value changes, with one warning. Changes end with the step in dictionaries, and in sets and deques that
    lead to parts of the module.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._modules = [module for module, _ in replicas[0].modules]
        self._prefixes = replicas.prefixes
        self._sample_counters = SampleCounters()
        self._warnings = WarningCache()
        self._look()

    def _look(self) -> None:
        """Remember the master's attributes, after some have changed."""
        self._seen = [dict(module.__dict__) for module in self._modules]
        places = {
            (position, name): value
            for position, module in enumerate(self._modules)
            for name, value in module.__dict__.items()
            if name not in _NOT_MIRRORED
        }
        first = [own.__dict__ for _, own in self._replicas[0].modules]
        not_shared = {place for place, value in places.items() if first[place[0]].get(place[1]) is not value}
        # Lists that lead to parts of the module are rewritten before every step, because copies do not follow them.
        self._rewritten = {place for place in not_shared if type(places[place]) is list}
        self._lists = [
            place
            for place, value in places.items()
            if type(value) is list and (_is_users(place) or place in self._rewritten)
        ]
        self._containers = [place for place in not_shared if type(places[place]) in COPIED and place[1] not in HOOKS]
        self._hooks = [module.__dict__[name] for module in self._modules for name in HOOKS]
        self._hook_ids = [*chain.from_iterable(self._hooks)]
        # Replicas on other devices have copies of plain tensors, which do not follow changes in place.
        on_one_device = len({replica.device for replica in self._replicas}) == 1
        tensors = [place for place, value in places.items() if isinstance(value, torch.Tensor)]
        self._tensors = [] if on_one_device else tensors
        self._tensor_versions = TensorVersions(self._values_at(self._tensors))

    def _values_at(self, places: Iterable[Place]) -> list[Any]:
        return [self._modules[position].__dict__.get(name) for position, name in places]

    def push(self) -> None:
        """Bring the master's attributes to every replica, and give each a copy of the master's lists."""
        changed = self._changed_places()
        hooks_have_changed = self._hook_ids != [*chain.from_iterable(self._hooks)]
        for replica in self._replicas:
            for position, name in changed:
                module, own = replica.modules[position]
                replica.references.forget_copy(self._seen[position].get(name))
                if name in module.__dict__:
                    replica.set_attribute(own, name, module.__dict__[name])
                else:
                    own.__dict__.pop(name, None)
            for module, own in replica.modules if hooks_have_changed else ():
                for name in HOOKS:
                    replica.set_attribute(own, name, module.__dict__[name])
        if changed or hooks_have_changed:
            self._look()
        # The list that each replica's list was copied from, whose entries are the replica's counterparts.
        self._origins: list[dict[Place, list[Any]]] = []
        self._pushed: list[list[dict[str, Any]]] = []
        for replica in self._replicas:
            for source in self._values_at(self._containers):
                replica.references.fill_copy(source)
            origins = {place: self._share_list(replica, place) for place in self._lists}
            for (position, name), origin in origins.items():
                if len(origin) <= _LONGEST_LIST:
                    replica.modules[position][1].__dict__[name] = list(origin)
            self._origins.append(origins)
            self._pushed.append([own.__dict__.copy() for _, own in replica.modules])
        self._entries = self._read_containers()

    def _read_containers(self) -> list[list[list[Any]]]:
        """Return the entries of each container on each replica."""
        sources = self._values_at(self._containers)
        return [[[*entries_of(replica.references.find(one))] for one in sources] for replica in self._replicas]

    def _share_list(self, replica: Replica, place: Place) -> list[Any]:
        position, name = place
        value: list[Any] = self._modules[position].__dict__[name]
        value = replica.references.rewrite(value) if place in self._rewritten else value
        replica.modules[position][1].__dict__[name] = value
        return value

    def _changed_places(self) -> set[Place]:
        changed = {self._tensors[n] for n in self._tensor_versions.changed(self._values_at(self._tensors))}
        if not _are_same([module.__dict__ for module in self._modules], self._seen):
            for position, (before, module) in enumerate(zip(self._seen, self._modules, strict=True)):
                changed.update((position, name) for name in _changed(before, module.__dict__) - _NOT_MIRRORED)
        return changed

    def pull(self, active: Sequence[int], sizes: Sequence[int]) -> None:
        """Merge the attributes that the active replicas' steps changed into the master; `sizes` are chunk sizes."""
        set_values = self._find_set_values(active)
        for place in self._lists:
            self._pull_list(active, place)
        now = self._read_containers()
        for n, place in enumerate(self._containers):
            if _is_users(place) and not all(are_identical(self._entries[index][n], now[index][n]) for index in active):
                self._warn(place, "was changed inside a step, where each replica has a copy; the copies are not merged")
        for place, values in set_values.items():
            self._pull_value(place, values, sizes)
        self._tensor_versions = TensorVersions(self._values_at(self._tensors))  # a step's changes stay there
        self._pushed, self._origins, self._entries = [], [], []

    def _find_set_values(self, active: Sequence[int]) -> dict[Place, list[Any]]:
        """Find the attributes other than lists that steps have set, each with the values of the replicas that did."""
        found: dict[Place, list[Any]] = {}
        for index in active:
            pushed = self._pushed[index]
            now = [own.__dict__ for _, own in self._replicas[index].modules]
            if _are_same(now, pushed):
                continue
            for position, (before, after) in enumerate(zip(pushed, now, strict=True)):
                for name in _changed(before, after) - _NOT_MIRRORED:
                    if (position, name) not in self._origins[index] and _is_users((position, name)):
                        found.setdefault((position, name), []).append(after.get(name, _MISSING))
        return found

    def _pull_list(self, active: Sequence[int], place: Place) -> None:
        position, name = place
        master = self._modules[position].__dict__[name]
        length = len(master)
        for index in active:
            own = self._replicas[index].modules[position][1].__dict__.get(name)
            origin = self._origins[index][place]
            if own is not self._pushed[index][position][name]:
                if _is_users(place):  # torch's LSTM sets its private list of weights
                    self._warn(place, f"was set inside a step, to another list on each replica{_FIRST}")
            elif own is not origin:
                if are_identical(own[:length], origin[:length]):
                    if new := own[length:]:
                        master.extend(to_device(new, self._replicas[0].device))
                else:
                    self._warn(place, f"was changed inside a step other than by appending{_FIRST}")
        for replica in self._replicas:  # hooks that run in the backward pass append to the master's list
            self._share_list(replica, place)

    def _pull_value(self, place: Place, values: list[Any], sizes: Sequence[int]) -> None:
        position, name = place
        master = self._modules[position]
        message = self._message(place, f"was set inside a step, to different values on the replicas{_FIRST}")
        value = self._combine(place, master.__dict__.get(name), values, sizes, message in self._warnings)
        if value is not _MISSING and not isinstance(value, torch.Tensor):
            setattr(master, name, value)
            return
        # The first replica's value stands for all, so that setting the attribute back in a hook is seen as a change.
        if values[0] is not _MISSING:
            master.__dict__[name] = to_device(values[0], self._replicas[0].device)
            self._seen[position][name] = master.__dict__[name]  # other attributes still have to reach the replicas
        if value is _MISSING:
            self._warnings.warn(message)

    def _combine(self, place: Place, before: Any, values: list[Any], sizes: Sequence[int], may_differ: bool) -> Any:
        """Make one value of the values that all replicas have set; _MISSING if they differ."""
        if len(values) < len(sizes):
            return _MISSING
        first = values[0]
        if all(isinstance(value, _SCALARS) for value in values):
            if all(type(value) is int for value in (before, *values)):
                raised = [value - before for value in values]
                if self._sample_counters.recognise(place, raised, sizes):
                    return before + sum(raised)
            if all(type(value) is type(first) and value == first for value in values):
                return first
        # Comparing tensors may wait for a device, so it ends with the warning that they differ.
        return first if len(values) > 1 and not may_differ and _are_equal_tensors(values) else _MISSING

    def _warn(self, place: Place, what: str) -> None:
        self._warnings.warn(self._message(place, what))

    def _message(self, place: Place, what: str) -> str:
        return (
            f"`self.{self._prefixes[place[0]]}{place[1]}` {what}."
            " Set it in a hook such as `on_train_batch_end`, append to a list, or use a metric."
        )


def _is_users(place: Place) -> bool:
    """Return False for names that libraries keep to themselves in submodules."""
    position, name = place
    return position == 0 or not name.startswith("_")


def _are_same(dictionaries: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> bool:
    """Compare names, and values by identity, of all modules in one pass each because this runs in every step."""
    return [*chain.from_iterable(dictionaries)] == [*chain.from_iterable(others)] and are_identical(
        [*chain.from_iterable(map(dict.values, dictionaries))], [*chain.from_iterable(map(dict.values, others))]
    )


def _changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in {**before, **after} if after.get(name, _MISSING) is not before.get(name, _MISSING)}


def _are_equal_tensors(values: Sequence[Any]) -> bool:
    """Return True if replicas have computed the same tensor, as from parameters alone."""
    first = values[0]
    return isinstance(first, torch.Tensor) and all(
        isinstance(value, torch.Tensor) and value.dtype == first.dtype and torch.equal(value.to(first.device), first)
        for value in values
    )

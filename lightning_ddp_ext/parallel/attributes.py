"""Plain attributes of modules: carrying them to the replicas before a step, and back after it."""

import operator
import warnings
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import nn

from lightning_ddp_ext._compat.torch import HOOKS, STRUCTURE
from lightning_ddp_ext.parallel.containers import to_device
from lightning_ddp_ext.parallel.replicas import Replica, Replicas

_MISSING = object()
_SCALARS = (int, float, str, bool, bytes, type(None), torch.dtype)
_LONGEST_LIST = 10_000

Place = tuple[int, str]  # position of a module in the tree, and name of its attribute


class AttributeMirror:
    """Keeps the attributes of replicas equal to the master's.

    What the user sets on the module between steps reaches every replica. What a step does to the attributes of its
    module comes back where it can: entries appended to lists, in the order of the replicas; counters of samples, added
    up; other scalars that every replica set to the same value. Anything else stays with its replica; the first one's is
    seen on the master, and a warning names it once. Lists of more than 10,000 entries are shared instead: what is
    appended is in no particular order. Dictionaries and sets are shared always.

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
        self._seen_ids: list[list[int]] = [[*map(id, seen.values())] for seen in self._seen]
        self._lists = self._find_lists()
        # Containers that were copied to be rewritten do not follow changes in place: rewrite them before every step.
        self._copied = {
            (position, name)
            for position, (module, copy) in enumerate(replicas[0].modules)
            for name, value in module.__dict__.items()
            if name not in self._own and isinstance(value, list | dict) and copy.__dict__[name] is not value
        }
        self._hooks = [[len(module.__dict__[name]) for name in HOOKS] for module in self._modules]
        self._lent: dict[int, list[dict[str, Any]]] = {}
        self._sample_counters: set[Place] = set()
        self._warned: set[Place] = set()

    def push(self) -> None:
        """Bring attributes that changed on the master since the last call to every replica."""
        changed = set(self._copied)
        for position, module in enumerate(self._modules):
            attributes, seen = module.__dict__, self._seen[position]
            if [*map(id, attributes.values())] == self._seen_ids[position]:
                continue
            changed.update(
                (position, name)
                for name in seen.keys() | attributes.keys()
                if name not in self._own and attributes.get(name, _MISSING) is not seen.get(name, _MISSING)
            )
            self._note(position)
        changed.update(self._grown_hooks())
        if len(changed) > len(self._copied):
            self._lists = self._find_lists()
        for replica in self._replicas:
            for place in changed:
                self._push_one(replica, place)

    def _note(self, position: int) -> None:
        attributes = self._modules[position].__dict__
        self._seen[position] = dict(attributes)
        self._seen_ids[position] = [*map(id, attributes.values())]

    def _grown_hooks(self) -> set[Place]:
        """Find dictionaries of hooks that have got or lost entries: what they hold may lead back to the master."""
        grown: set[Place] = set()
        for position, module in enumerate(self._modules):
            lengths = [len(module.__dict__[name]) for name in HOOKS]
            if lengths != self._hooks[position]:
                self._hooks[position] = lengths
                grown.update((position, name) for name in HOOKS)
        self._copied |= grown
        return grown

    def _push_one(self, replica: Replica, place: Place) -> None:
        position, name = place
        module, copy = replica.modules[position]
        if name in module.__dict__:
            copy.__dict__[name] = replica.references.rewrite(module.__dict__[name])
        else:
            copy.__dict__.pop(name, None)

    def _find_lists(self) -> list[Place]:
        return [
            (position, name)
            for position, module in enumerate(self._modules)
            for name, value in module.__dict__.items()
            if type(value) is list and self._is_users(position, name)
        ]

    def _is_users(self, position: int, name: str) -> bool:
        """Tell attributes that a person may want back from what libraries keep for themselves below the root."""
        return name not in self._own and (position == 0 or not name.startswith("_"))

    def lend(self, active: Sequence[int]) -> None:
        """Give each replica that is about to run its own copy of the master's lists, to append to."""
        for index in active:
            modules = self._replicas[index].modules
            for position, name in self._lists:
                attributes = modules[position][1].__dict__
                if len(attributes[name]) <= _LONGEST_LIST:
                    attributes[name] = list(attributes[name])
            self._lent[index] = [dict(copy.__dict__) for _, copy in modules]

    def collect(self, active: Sequence[int], sizes: Sequence[int]) -> None:
        """Bring back to the master what the step did to the attributes of the replicas.

        Args:
            active: Indices of the replicas that ran, in order.
            sizes: Number of samples of each of them.
        """
        for position, name in self._lists:
            self._collect_list(active, (position, name))
        rebound: dict[Place, list[Any]] = {}
        for index in active:
            for position, before in enumerate(self._lent.pop(index)):
                after = self._replicas[index].modules[position][1].__dict__
                if [*map(id, after.values())] == [*map(id, before.values())]:
                    continue
                for name in after.keys() | before.keys():
                    value = after.get(name, _MISSING)
                    changed = value is not before.get(name, _MISSING) and (position, name) not in self._lists
                    if changed and self._is_users(position, name):
                        rebound.setdefault((position, name), []).append(value)
        for place, values in rebound.items():
            self._collect_rebound(place, values, list(sizes))

    def _collect_list(self, active: Sequence[int], place: Place) -> None:
        position, name = place
        original = self._modules[position].__dict__[name]
        length = len(original)
        for index in active:
            replica = self._replicas[index]
            attributes = replica.modules[position][1].__dict__
            lent = self._lent[index][position][name]
            if attributes.get(name) is lent and lent is not original:
                kept = len(lent) >= length and all(
                    map(operator.is_, lent, replica.references.rewrite(original)[:length])
                )
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
        before = master.__dict__.get(name)
        if len(values) == len(sizes) and all(isinstance(value, _SCALARS) for value in values):
            if _is_count(before) and all(map(_is_count, values)):
                steps = [value - before for value in values]
                # With chunks of one sample, a counter of samples looks like one of steps.
                if steps == sizes and (set(sizes) != {1} or place in self._sample_counters):
                    self._sample_counters.add(place)
                    setattr(master, name, before + sum(steps))
                    return
            if all(type(value) is type(values[0]) and value == values[0] for value in values):
                setattr(master, name, values[0])
                return
        # The first replica's value stands for all, so that setting the attribute back in a hook is seen as a change.
        if values[0] is not _MISSING:
            master.__dict__[name] = to_device(values[0], self._replicas[0].device)
            self._note(position)
        if not _is_recomputed(master, name):
            self._warn(place, "was set inside a step, to a value of its own on each replica")

    def _warn(self, place: Place, what: str) -> None:
        if place in self._warned:
            return
        self._warned.add(place)
        warnings.warn(
            f"`self.{self._names[place[0]]}{place[1]}` {what}; only the first replica's is seen on the module itself."
            " Set it in a hook such as `on_train_batch_end`, append to a list, or use a metric.",
            stacklevel=2,
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_recomputed(module: nn.Module, name: str) -> bool:
    """Tell a weight that a hook computes from parameters before every forward, as for pruning or spectral norm."""
    return any(f"{name}_{part}" in module._parameters for part in ("orig", "g"))


def _names_of(replicas: Replicas) -> list[str]:
    names: dict[int, str] = {id(module): name for name, module in replicas.master.named_modules()}
    modules: list[nn.Module] = [module for module, _ in replicas[0].modules]
    return [names[id(module)] for module in modules]

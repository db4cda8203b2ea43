"""Plain attributes of modules: carrying them to the replicas before a step, and back after it."""

import warnings
from collections.abc import Sequence, Set
from typing import Any

import torch

from lightning_ddp_ext._compat.torch import COMPILED_CALL, STRUCTURE
from lightning_ddp_ext.parallel.replicas import Replica, Replicas
from lightning_ddp_ext.parallel.scattering import to_device

_MISSING = object()
_SCALARS = (int, float, str, bool, bytes, type(None), torch.dtype)
_LONGEST_LIST = 10_000


class AttributeMirror:
    """Keeps the attributes of replicas equal to the master's.

    What the user sets on the module between steps reaches every replica. What a step does to the module itself comes
    back where it can: lists that were appended to, in the order of the replicas, and scalars that every replica set to
    the same value, such as counters. Anything else stays with its replica, and a warning names it.

    Args:
        replicas: The replicas, just built.
        own: Names of attributes that replicas have values of their own for.
    """

    def __init__(self, replicas: Replicas, own: Set[str] = frozenset()) -> None:
        self._replicas = replicas
        self._own = own | STRUCTURE | {COMPILED_CALL}
        self._seen = [(module, dict(module.__dict__)) for module, _ in replicas[0].modules]
        self._seen_ids = [[*map(id, seen.values())] for _, seen in self._seen]
        # Containers that were copied to be rewritten do not follow changes in place: rewrite them before every step.
        self._copied = {
            (position, name)
            for position, (module, copy) in enumerate(replicas[0].modules)
            for name, value in module.__dict__.items()
            if name not in self._own and isinstance(value, list | dict) and copy.__dict__[name] is not value
        }
        self._lent: dict[int, dict[str, Any]] = {}
        self._warned: set[str] = set()

    def push(self) -> None:
        """Bring attributes that changed on the master since the last call to every replica."""
        changed = set(self._copied)
        for position, (module, seen) in enumerate(self._seen):
            attributes = module.__dict__
            if [*map(id, attributes.values())] == self._seen_ids[position]:
                continue
            names = seen.keys() | attributes.keys()
            changed.update(
                (position, name)
                for name in names
                if name not in self._own and attributes.get(name, _MISSING) is not seen.get(name, _MISSING)
            )
            self._seen[position] = (module, dict(attributes))
            self._seen_ids[position] = [*map(id, attributes.values())]
        for replica in self._replicas:
            for position, name in changed:
                self._push_one(replica, position, name)

    @staticmethod
    def _push_one(replica: Replica, position: int, name: str) -> None:
        module, copy = replica.modules[position]
        if name in module.__dict__:
            copy.__dict__[name] = replica.references.rewrite(module.__dict__[name])
        else:
            copy.__dict__.pop(name, None)

    def lend(self, active: Sequence[int]) -> None:
        """Give each replica that is about to run its own copy of the master's lists, to append to."""
        for index in active:
            attributes = self._replicas[index].module.__dict__
            for name, value in self._replicas.master.__dict__.items():
                if type(value) is list and len(value) <= _LONGEST_LIST and name not in self._own:
                    attributes[name] = list(attributes[name])
            self._lent[index] = dict(attributes)

    def collect(self, active: Sequence[int]) -> None:
        """Bring back to the master what the step did to the attributes of the replicas."""
        rebound: dict[str, list[Any]] = {}
        grown: dict[str, list[Any]] = {}
        for index in active:
            replica = self._replicas[index]
            for name, before in self._lent.pop(index).items():
                after = replica.module.__dict__.get(name, _MISSING)
                if after is not before:
                    rebound.setdefault(name, []).append(after)
                elif type(before) is list:
                    self._collect_list(replica, name, before, grown)
            for name in replica.module.__dict__.keys() - self._replicas.master.__dict__.keys() - self._own:
                rebound.setdefault(name, []).append(replica.module.__dict__[name])
        for name, items in grown.items():
            self._replicas.master.__dict__[name].extend(items)
        for name, values in rebound.items():
            if name not in self._own:
                self._collect_rebound(name, values, len(active))

    def _collect_list(self, replica: Replica, name: str, lent: list[Any], grown: dict[str, list[Any]]) -> None:
        original = self._replicas.master.__dict__.get(name)
        if original is None or lent is original:
            return
        grown.setdefault(name, []).extend(to_device(lent[len(original) :], self._replicas[0].device))
        replica.module.__dict__[name] = replica.references.rewrite(original)

    def _collect_rebound(self, name: str, values: list[Any], num_active: int) -> None:
        agreed = len(values) == num_active and all(
            isinstance(value, _SCALARS) and type(value) is type(values[0]) and value == values[0] for value in values
        )
        if agreed:
            setattr(self._replicas.master, name, values[0])
        elif name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"`self.{name}` was set inside a step, to a value of its own on each replica; the module keeps its old"
                " value. Set it in a hook such as `on_train_batch_end`, or use a buffer, a list or a metric.",
                stacklevel=2,
            )

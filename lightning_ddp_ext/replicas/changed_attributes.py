"""Plain attributes of the module: from the module to its replicas before a step, and back after it."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from lightning_ddp_ext._compat.lightning import REPLICA_ATTRIBUTES
from lightning_ddp_ext._compat.torch import HOOKS, STRUCTURE, TensorVersions, are_identical
from lightning_ddp_ext._lightning import rank_zero_warn
from lightning_ddp_ext.batches.containers import to_device
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.replicas.attribute_copies import COPIED, find_hiding_function, walk_references
from lightning_ddp_ext.replicas.replica import SHARED, AttributePlace, Replicas

_MISSING = object()
_SCALARS = (int, float, str, bool, bytes, type(None), torch.dtype)
_LONGEST_LIST = 10_000
_COPIED_ALWAYS = (dict, OrderedDict, defaultdict, Counter, set, deque)
_NOT_MIRRORED = STRUCTURE | REPLICA_ATTRIBUTES | {"forward"}


class AttributeMirror:
    """Pushes the master's attributes to the replicas before a step, and merges the step's changes into the master.

    Numbers and texts that all replicas set alike come back, and items that they append to lists. Any other value stays
    with its replica until the master's value changes, and changes of dictionaries, sets and deques end with the step;
    one warning names the attribute.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._modules = [module for module, _ in replicas[0].modules]
        self._prefixes = replicas.prefixes
        self._warned: set[AttributePlace] = set()
        self._kept: set[AttributePlace] = set()  # where each replica keeps its own value
        self._refuse_hidden_parts((n, name) for n, module in enumerate(self._modules) for name in vars(module))
        self._look()

    def _refuse_hidden_parts(self, places: Iterable[AttributePlace]) -> None:
        """Refuse functions by which replicas would use parts of the module, or its dictionaries, not their own."""
        find = self._replicas[0].references.find
        # Every replica has a copy of a dictionary, set or deque.
        copied = {id(one) for module in self._modules for one in vars(module).values() if type(one) in _COPIED_ALWAYS}
        for position, name in places:
            value = vars(self._modules[position]).get(name)
            if name in SHARED or value is None:
                continue
            function = find_hiding_function(value, lambda one: find(one) is not None or id(one) in copied)
            if function is not None:
                code = function.__code__
                raise UnsupportedFeatureError(
                    f"`self.{self._prefixes[position]}{name}` holds the function `{function.__qualname__}`"
                    f" ({code.co_filename}, line {code.co_firstlineno}) with a part of the module, or one of its"
                    " dictionaries, in its closure or in a default of an argument: under `balanced_dp`, all replicas"
                    " would use it. Keep the part as an attribute of the module, and use it by `self` in a method; or"
                    " pass it with `functools.partial`."
                )

    def _look(self) -> None:
        """Remember the master's attributes, after some have changed."""
        self._seen = [dict(module.__dict__) for module in self._modules]
        places = {
            (position, name): value
            for position, module in enumerate(self._modules)
            for name, value in module.__dict__.items()
            if name not in _NOT_MIRRORED
        }
        owned = [own.__dict__ for _, own in self._replicas[0].modules]
        copied = {place for place, value in places.items() if owned[place[0]].get(place[1]) is not value}
        # Steps append to lists, except to lists that lead to parts of the module, and private lists of libraries.
        self._lists = [
            place for place, value in places.items() if type(value) is list and place not in copied and _is_users(place)
        ]
        found = [
            place
            for place, value in places.items()
            if place in copied
            and type(value) in COPIED
            and (place[1] not in HOOKS or any(type(hook) is partial for hook in value.values()))
        ]
        # Arguments of partial functions, as in hooks, may be other containers, which are copied first.
        self._containers = sorted(found, key=lambda place: type(places[place]) is partial or place[1] in HOOKS)
        self._hooks = [module.__dict__[name] for module in self._modules for name in HOOKS]
        self._hook_ids = [*chain.from_iterable(self._hooks)]
        # Replicas on other devices have copies of plain tensors, which do not follow changes in place.
        on_one_device = len({replica.device for replica in self._replicas}) == 1
        tensors = [place for place, value in places.items() if isinstance(value, torch.Tensor)]
        self._tensors = [] if on_one_device else tensors
        self._tensor_versions = TensorVersions(self._values_at(self._tensors))

    def _values_at(self, places: Iterable[AttributePlace]) -> list[Any]:
        return [self._modules[position].__dict__.get(name) for position, name in places]

    def push(self) -> None:
        """Bring the master's attributes to every replica, and give each a copy of the master's containers."""
        changed = self._changed_places()
        if self._hook_ids != [*chain.from_iterable(self._hooks)]:
            changed.update((position, name) for position in range(len(self._modules)) for name in HOOKS)
        self._refuse_hidden_parts(changed)
        self._kept -= changed
        for replica in self._replicas:
            replica.references.forget_copies()
            for position, name in changed:
                module, own = replica.modules[position]
                if name in module.__dict__:
                    replica.set_attribute(own, name, module.__dict__[name])
                else:
                    own.__dict__.pop(name, None)
        if changed:
            self._look()
        self._before = {
            (position, name): [*self._modules[position].__dict__[name]]
            for position, name in self._lists
            if (position, name) not in self._kept
        }
        self._pushed: list[list[dict[str, Any]]] = []
        for replica in self._replicas:
            for position, name in self._containers:
                if (position, name) not in self._kept:
                    module, own = replica.modules[position]
                    own.__dict__[name] = replica.references.rewrite(module.__dict__[name])
            for (position, name), values in self._before.items():
                if len(values) <= _LONGEST_LIST:
                    replica.modules[position][1].__dict__[name] = [*values]
            self._pushed.append([own.__dict__.copy() for _, own in replica.modules])
        self._entries = self._read_containers()

    def _read_containers(self) -> list[list[list[Any]]]:
        """Return the entries of each container that each replica has been given."""
        return [
            [[*walk_references(pushed[position].get(name))] for position, name in self._containers]
            for pushed in self._pushed
        ]

    def _changed_places(self) -> set[AttributePlace]:
        changed = {self._tensors[n] for n in self._tensor_versions.changed(self._values_at(self._tensors))}
        if not _are_same([module.__dict__ for module in self._modules], self._seen):
            for position, (before, module) in enumerate(zip(self._seen, self._modules, strict=True)):
                changed.update((position, name) for name in _changed(before, module.__dict__) - _NOT_MIRRORED)
        return changed

    def pull(self, active: Sequence[int], sizes: Sequence[int]) -> None:
        """Merge the attributes that the active replicas' steps changed into the master; `sizes` are chunk sizes."""
        set_values = self._find_set_values(active)
        now = self._read_containers()
        for n, place in enumerate(self._containers):
            if not all(are_identical(self._entries[index][n], now[index][n]) for index in active):
                self._warn(place)
        for place, values in set_values.items():
            self._pull_value(place, values, sizes)
        for place, before in self._before.items():
            if place not in self._kept:
                self._pull_list(active, place, before)
        self._tensor_versions = TensorVersions(self._values_at(self._tensors))  # a step's changes stay there
        self._pushed, self._before, self._entries = [], {}, []

    def _find_set_values(self, active: Sequence[int]) -> dict[AttributePlace, list[Any]]:
        """Find the attributes that steps have set, each with the values of the replicas that did."""
        found: dict[AttributePlace, list[Any]] = {}
        for index in active:
            pushed = self._pushed[index]
            now = [own.__dict__ for _, own in self._replicas[index].modules]
            if _are_same(now, pushed):
                continue
            for position, (before, after) in enumerate(zip(pushed, now, strict=True)):
                for name in _changed(before, after) - _NOT_MIRRORED:
                    if _is_users((position, name)):
                        found.setdefault((position, name), []).append(after.get(name, _MISSING))
        return found

    def _pull_list(self, active: Sequence[int], place: AttributePlace, before: list[Any]) -> None:
        position, name = place
        master: list[Any] = self._modules[position].__dict__[name]
        for index in active:
            own = self._pushed[index][position][name]
            if not are_identical(own[: len(before)], before):
                self._warn(place)
            elif own is not master and (new := own[len(before) :]):
                master.extend(to_device(new, self._replicas[0].device))
        for replica in self._replicas:  # hooks that run in the backward pass append to the master's list
            replica.modules[position][1].__dict__[name] = master

    def _pull_value(self, place: AttributePlace, values: list[Any], sizes: Sequence[int]) -> None:
        position, name = place
        master, first = self._modules[position], values[0]
        are_alike = len(values) == len(sizes) and self._are_alike(place, values, sizes)
        if are_alike and not isinstance(first, torch.Tensor):
            setattr(master, name, first)
            return
        # The first replica's value stands for all, so that setting the attribute back in a hook is seen as a change.
        if first is not _MISSING:
            master.__dict__[name] = to_device(first, self._replicas[0].device)
            self._seen[position][name] = master.__dict__[name]  # other attributes still have to reach the replicas
        if not are_alike:
            self._kept.add(place)
            self._warn(place)

    def _are_alike(self, place: AttributePlace, values: list[Any], sizes: Sequence[int]) -> bool:
        """Return True if every replica has set the number, text or tensor that one device would set."""
        first = values[0]
        if all(isinstance(value, _SCALARS) for value in values):
            before = self._modules[place[0]].__dict__.get(place[1])
            # Chunks of one size have the same number of samples, which is not the number of the whole batch.
            counts_samples = type(before) is type(first) is int and {first - before} == {*sizes} != {1}
            alike = all(type(value) is type(first) and value == first for value in values)
            return alike and not (counts_samples and len(sizes) > 1)
        # Comparing tensors may wait for a device, so it ends with the warning that they differ.
        return len(values) > 1 and place not in self._warned and _are_equal_tensors(values)

    def _warn(self, place: AttributePlace) -> None:
        if place in self._warned or not _is_users(place):
            return
        self._warned.add(place)
        rank_zero_warn(
            f"`self.{self._prefixes[place[0]]}{place[1]}` was changed inside a step by each replica for its chunk, and"
            " these changes do not come back to the module, which shows the first replica's value at most. Let the step"
            " set a number or text that does not depend on the chunk, or append to a list; use a metric or a buffer; or"
            " set the attribute in a hook such as `on_train_batch_end`."
        )


def _is_users(place: AttributePlace) -> bool:
    """Return False for names that libraries keep to themselves in submodules."""
    position, name = place
    return name not in HOOKS and (position == 0 or not name.startswith("_"))


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

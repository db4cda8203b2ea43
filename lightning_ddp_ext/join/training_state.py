"""Giving the training state that a step has changed to ranks that did not run the step."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric, MetricCollection

from lightning_ddp_ext._compat.loops import manual_step_progress
from lightning_ddp_ext._compat.torch import version_of, versions_of
from lightning_ddp_ext.consistency.fingerprints import fingerprint
from lightning_ddp_ext.consistency.setups import find_ignored
from lightning_ddp_ext.distributed.flat_tensors import overwrite
from lightning_ddp_ext.distributed.serialization import name_skipped, pack, unpack
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.reducer.buffers import same_values
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from lightning_ddp_ext.replicas.attributes import SampleCounters

# What is the same on every rank without being sent: code.
_CODE = (type, FunctionType, BuiltinFunctionType, partial, Enum)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, numpy.generic, torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict, set)
_LARGE = 2**20  # bytes of a parameter from which a fingerprint takes the place of a copy
_LARGEST_DICTIONARY = 64  # entries of a dictionary that is looked into

_data_pointer = methodcaller("data_ptr")
_requires_grad = attrgetter("requires_grad")


class StepMirror:
    """Finds the training state that a training step has changed, for the ranks that did not run the step.

    This is the state that Lightning, the reducer and torchmetrics do not keep equal anyway: parameters and their
    `requires_grad`, shapes of buffers, settings and state of optimizers, schedulers, and plain attributes of modules
    and optimizers (numbers, text, tuples of these, also as entries of small dictionaries). Under manual optimization
    gradients, the gradient scaler and the number of steps are part of it.

    Changes are known from identities and versions. A change through `.data` has neither, so parameters are also
    compared by value.

    Args:
        trainer: The Trainer, while it fits.
        module: Its module.
        reducer: Synchronises the gradients of the module.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, reducer: GradientReducer) -> None:
        self._trainer = trainer
        self._module = module
        self._reducer = reducer
        self._counters = SampleCounters()
        self._has_warned = False

    def begin_phase(self) -> None:
        """Begin a run of steps that the same ranks take part in; on every rank."""
        self._look()

    def _look(self) -> None:
        """Look at the structure of the module, which rarely changes."""
        metrics = [part for part in self._module.modules() if isinstance(part, Metric | MetricCollection)]
        of_metrics = {id(part) for metric in metrics for part in metric.modules()}
        self._parts = {name: part for name, part in self._module.named_modules() if id(part) not in of_metrics}
        ignored = find_ignored(self._module)
        self._parameters = {name: one for name, one in self._module.named_parameters() if name not in ignored}
        parts = self._parts.values()
        tree = [(None, entries) for part in parts for entries in (part._modules, part._parameters) if entries]
        self._tree = _Entries(tree)
        self._buffers = _Entries((name, part._buffers) for name, part in self._parts.items() if part._buffers)
        self._ignored = ignored
        owners: list[tuple[tuple[str, Any], Any]] = [(("module", name), part) for name, part in self._parts.items()]
        owners += [(("optimizer", number), optimizer) for number, optimizer in enumerate(self._trainer.optimizers)]
        self._attributes = _Entries(((place, vars(owner)) for place, owner in owners), _inherited())
        self._dictionaries = [
            (place, name, value)
            for place, owner in owners
            for name, value in vars(owner).items()
            if isinstance(value, dict) and name not in _inherited()
        ]

    @torch.no_grad()
    def remember(self) -> None:
        """Remember the state before a step, on a rank that runs it."""
        self._marks = _marks(self._parameters.values())
        self._values = {name: _value(parameter) for name, parameter in self._parameters.items()}
        for entries in (self._tree, self._buffers, self._attributes):
            entries.remember()
        self._entries = [
            (place, name, dictionary, dictionary.copy())
            for place, name, dictionary in self._dictionaries
            if len(dictionary) <= _LARGEST_DICTIONARY
        ]
        self._versions = {name: version_of(one) for name, one in vars(self._module).items() if isinstance(one, Tensor)}
        self._settings = [_versioned(_settings(optimizer)) for optimizer in self._trainer.optimizers]
        self._states = [_versioned(_state(optimizer)) for optimizer in self._trainer.optimizers]
        self._schedules = [vars(scheduler).copy() for scheduler in self._schedulers()]

    @torch.no_grad()
    def changes(self, samples: float) -> Tensor | None:
        """Return what has changed since `remember`, serialised; None if nothing has.

        Args:
            samples: Samples of the batch. A number raised by it counts samples, and belongs to the rank.

        Raises:
            UnsupportedFeatureError: If something has changed that cannot be sent.
        """
        found = {
            "buffers": self._changed_buffers(),
            "attributes": self._changed_attributes(samples),
            **self._changed_parameters(),
            **self._changed_optimization(),
        }
        state = {name: value for name, value in found.items() if value}
        if not self._module.automatic_optimization:
            state.update(self._left_by_manual_step())
        if not state:
            return None
        packed = pack(state)
        strange = {place: value for place, value in packed.skipped.items() if not isinstance(value, _CODE)}
        if not strange:
            return packed.data
        raise UnsupportedFeatureError(
            "`ddp_join` sends the state of optimizers and schedulers that `training_step` changes to ranks without"
            f" data, and it holds {name_skipped(strange)}, which is neither a number nor a tensor."
            ' Use `uneven_inputs="stop"`.'
        )

    @torch.no_grad()
    def take(self, changes: Tensor) -> None:
        """Take over what has changed on the rank that has run the step.

        Raises:
            UnsupportedFeatureError: If it cannot be taken over.
        """
        state, skipped = unpack(changes)
        if skipped:
            state, _ = unpack(changes, pack(self._own_counterpart(state)).skipped)
        self._take_tensors(state)
        for place, path, before, after in state.get("attributes", ()):
            self._take_attribute(place, path, before, after)
        for number, groups in state.get("settings", {}).items():
            self._take_settings(self._trainer.optimizers[number], groups)
        ignored = set(self._module.parameters()).difference(self._parameters.values())
        for number, values in state.get("optimizers", {}).items():
            _load(self._trainer.optimizers[number], values, own=ignored)
        for number, values in state.get("schedulers", {}).items():
            self._schedulers()[number].load_state_dict(values)
        if "progress" in state:
            self._trainer.precision_plugin.load_state_dict(state["precision"])
            manual_step_progress(self._trainer).load_state_dict(state["progress"])
            for parameter, gradient in zip(self._parameters.values(), state["gradients"] or (), strict=False):
                parameter.grad = None if gradient is None else _restored(parameter, *gradient)

    def _take_settings(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        if len(groups) != len(optimizer.param_groups):
            raise UnsupportedFeatureError(
                f"rank {self._trainer.global_rank}: `training_step` on a rank with data has made {len(groups)}"
                f" parameter groups of `{type(optimizer).__name__}`, and this rank without data has"
                f" {len(optimizer.param_groups)}. Call `add_param_group` in a hook that all ranks run, such as"
                " `on_train_batch_start`."
            )
        for own, values in zip(optimizer.param_groups, groups, strict=True):
            for name, value in values.items():
                is_tensor = isinstance(value, Tensor) and isinstance(own.get(name), Tensor)
                own[name] = value.to(own[name].device) if is_tensor else value

    def _changed_parameters(self) -> dict[str, Any]:
        changed: set[str] = set()
        known, marks = self._parameters, self._marks
        has_new_parts = self._tree.have_changed()
        if has_new_parts:
            self._look()
        now = _marks(self._parameters.values())
        if has_new_parts or now != marks:
            before = {name: (id(one), *mark) for (name, one), *mark in zip(known.items(), *marks, strict=True)}
            after = {name: (id(one), *mark) for (name, one), *mark in zip(self._parameters.items(), *now, strict=True)}
            changed = {name for name, mark in after.items() if mark != before.get(name)}
        for name, value in self._values.items():
            parameter = self._parameters.get(name)
            if parameter is not None and name not in changed and _differs(value, parameter):
                changed.add(name)
        if not changed:
            return {}
        sent = {name: one for name, one in self._parameters.items() if name in changed}
        return {
            "parameters": sent,
            "requires_grad": {name: parameter.requires_grad for name, parameter in sent.items()},
        }

    def _changed_buffers(self) -> dict[str, Tensor | None]:
        """Return buffers that are of another form now; under manual optimization all.

        The reducer makes the values of others equal, but not of those that change after the last backward pass of a
        manual step.
        """
        if not self._module.automatic_optimization:
            named = [
                (f"{name}.{leaf}", one) for name, part in self._parts.items() for leaf, one in part._buffers.items()
            ]
            return {name.lstrip("."): one for name, one in named if name.lstrip(".") not in self._ignored}
        found = {}
        for path, leaf, old, new in self._buffers.differences():
            name = f"{path}.{leaf}".lstrip(".")
            if old and new and _form(old[0]) != _form(new[0]) and name not in self._ignored:
                found[name] = new[0]
        return found

    def _take_tensors(self, state: dict[str, Any]) -> None:
        for name, value in state.get("parameters", {}).items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != value.shape:
                raise UnsupportedFeatureError(
                    f"rank {self._trainer.global_rank}: `training_step` on a rank with data has made the parameter"
                    f" `{name}`, of shape {list(value.shape)}, and this rank without data has none like it. Create it"
                    " in `__init__`, `configure_model` or `setup` of the module."
                )
            if parameter.numel():
                overwrite([parameter], value.to(parameter.device, parameter.dtype).view(-1), [True])
        for name, requires_grad in state.get("requires_grad", {}).items():
            self._parameters[name].requires_grad_(requires_grad)
        for name, value in state.get("buffers", {}).items():
            path, _, leaf = name.rpartition(".")
            buffers = self._parts[path]._buffers
            own = buffers.get(leaf)
            if value is not None and _form(own) == _form(value):
                own.copy_(value)
            else:
                buffers[leaf] = None if value is None else value.to(self._module.device)

    def _changed_attributes(self, samples: float) -> list[Any]:
        """Return place, path, and value before and after, in lists that are empty where there is none."""
        found = [(place, [name], old, new) for place, name, old, new in self._attributes.differences()]
        for place, name, entries, before in self._entries:
            found += [(place, [name, key], old, new) for key, old, new in _differences(before, entries)]
        sent = []
        for place, path, old, new in found:
            if not all(map(_is_plain, [*old, *new])):
                if place == ("module", ""):
                    self._warn(path[0] + "".join(f"[{key!r}]" for key in path[1:]), new)
            elif not self._counts_samples((*place, *path), [*old, *new], samples):
                sent.append((place, path, old, new))
        for name, version in self._versions.items():
            value = vars(self._module).get(name)
            if isinstance(value, Tensor) and version != version_of(value):
                self._warn(name, [value])
        return sent

    def _counts_samples(self, key: Hashable, numbers: list[Any], samples: float) -> bool:
        if len(numbers) < 2 or not all(isinstance(number, int | float) for number in numbers):
            return False
        return self._counters.recognise(key, [numbers[1] - numbers[0]], [int(samples)])

    def _take_attribute(self, place: tuple[str, Any], path: list[Any], before: list[Any], after: list[Any]) -> None:
        """Set an attribute that was the same on both ranks; others belong to a rank."""
        kind, owner = place
        entries = vars(self._parts[owner] if kind == "module" else self._trainer.optimizers[owner])
        for name in path[:-1]:
            entries = entries.get(name, {})
        own = [entries[path[-1]]] if path[-1] in entries else []
        if not all(map(_is_plain, own)) or not _are_same(own, before):
            return
        if after:
            entries[path[-1]] = after[0]
        else:
            del entries[path[-1]]

    def _warn(self, name: str, values: list[Any]) -> None:
        """Warn of an attribute, unless it is known to belong to a batch, as one that has a graph or collects."""
        is_of_batch = all(isinstance(value, _CONTAINERS) or getattr(value, "requires_grad", False) for value in values)
        if self._has_warned or is_of_batch:
            return
        self._has_warned = True
        warnings.warn(
            f"rank {self._trainer.global_rank}: `training_step` changes `self.{name}`, of type"
            f" `{type(values[0]).__name__}`, which ranks that have run out of data keep as it was. If training depends"
            " on it, register it as a buffer, or make it a number.",
            stacklevel=2,
        )

    def _schedulers(self) -> list[LRScheduler]:
        """Return the schedulers that Lightning steps, and those that the module keeps and steps itself."""
        own = [value for value in vars(self._module).values() if isinstance(value, LRScheduler)]
        return [*(config.scheduler for config in self._trainer.lr_scheduler_configs), *own]

    def _changed_optimization(self) -> dict[str, Any]:
        settings, states = {}, {}
        for number, optimizer in enumerate(self._trainer.optimizers):
            # A manual step changes state in any depth, such as in a list, which has no version.
            is_manual = not self._module.automatic_optimization
            if is_manual or _have_changed(self._states[number], _versioned(_state(optimizer))):
                states[number] = optimizer.state_dict()
            elif _have_changed(self._settings[number], _versioned(_settings(optimizer))):
                settings[number] = _settings_of_groups(optimizer)
        schedulers = {
            number: scheduler.state_dict()
            for number, scheduler in enumerate(self._schedulers())
            if any(_differences(self._schedules[number], vars(scheduler)))
        }
        return {"settings": settings, "optimizers": states, "schedulers": schedulers}

    def _left_by_manual_step(self) -> dict[str, Any]:
        parameters = list(self._parameters.values())
        has_own = self._reducer.unsynchronized(parameters)
        return {
            "precision": self._trainer.precision_plugin.state_dict(),
            "progress": manual_step_progress(self._trainer).state_dict(),
            # What is still being accumulated on each rank by itself stays there.
            "gradients": None if has_own else [_described(parameter.grad) for parameter in parameters],
        }

    def _own_counterpart(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank has in the places of a state that hold code."""
        optimizers, schedulers = self._trainer.optimizers, self._schedulers()
        return {
            "settings": {number: _settings_of_groups(optimizers[number]) for number in state.get("settings", ())},
            "optimizers": {number: optimizers[number].state_dict() for number in state.get("optimizers", ())},
            "schedulers": {number: schedulers[number].state_dict() for number in state.get("schedulers", ())},
        }


class _Entries:
    """Entries of dictionaries, compared by identity in one pass, because this runs in every step.

    Args:
        dictionaries: The dictionaries, each with a key.
        without: Names of entries that are left alone.
    """

    def __init__(self, dictionaries: Iterable[tuple[Any, dict[Any, Any]]], without: Set[str] = frozenset()) -> None:
        self._dictionaries = list(dictionaries)
        self._without = without
        self._sizes: list[int] = []
        self._names: list[list[Any]] = []
        self._getters: list[Callable[[dict[Any, Any]], tuple[Any, ...]]] = []
        self._before: list[tuple[Any, ...]] | None = None

    def remember(self) -> None:
        """Remember the entries as they are."""
        values = self._values()
        if values is None:
            self._names = [[name for name in one if name not in self._without] for _, one in self._dictionaries]
            # Of one name, a getter returns no tuple; of none, there is no getter.
            self._getters = [itemgetter(*names, names[0]) if names else _nothing for names in self._names]
            self._sizes = [len(entries) for _, entries in self._dictionaries]
        self._before = self._values() if values is None else values

    def have_changed(self) -> bool:
        """Tell whether any entry is another object now, has come or gone."""
        assert self._before is not None
        now = self._values()
        return now is None or not all(map(is_, chain.from_iterable(self._before), chain.from_iterable(now)))

    def differences(self) -> Iterator[tuple[Any, Any, list[Any], list[Any]]]:
        """Find the entries that are other objects now; with values before and after, as `_differences` does."""
        if self.have_changed():
            assert self._before is not None
            for (key, entries), names, values in zip(self._dictionaries, self._names, self._before, strict=True):
                before = dict(zip(names, values, strict=False))
                after = {name: value for name, value in entries.items() if name not in self._without}
                yield from ((key, *difference) for difference in _differences(before, after))

    def _values(self) -> list[tuple[Any, ...]] | None:
        """Return the entries that were there when they were remembered; None if there are others now."""
        if self._sizes != [len(entries) for _, entries in self._dictionaries]:
            return None
        try:
            return [get(entries) for get, (_, entries) in zip(self._getters, self._dictionaries, strict=True)]
        except KeyError:
            return None


def _nothing(entries: dict[Any, Any]) -> tuple[()]:
    return ()


def _differences(before: dict[Any, Any], after: dict[Any, Any]) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """Find the entries that are other objects, with their values, in lists that are empty where there is none."""
    if len(before) == len(after) and all(map(is_, before.values(), after.values())):
        return
    for name in {**before, **after}:
        old, new = ([entries[name]] if name in entries else [] for entries in (before, after))
        if len(old) != len(new) or not all(map(is_, old, new)):
            yield name, old, new


@lru_cache(maxsize=1)
def _inherited() -> Set[str]:
    """Return the attributes that modules and optimizers have from their bases, which are left alone."""
    optimizer = torch.optim.SGD([torch.zeros(())])
    return (vars(LightningModule()).keys() | vars(optimizer).keys()) - {"training"}


def _marks(parameters: Iterable[Tensor]) -> tuple[list[Any], ...]:
    """Return what tells changes of parameters: versions, addresses and `requires_grad`."""
    parameters = list(parameters)
    return versions_of(parameters), [*map(_data_pointer, parameters)], [*map(_requires_grad, parameters)]


def _value(parameter: Tensor) -> Tensor | int:
    return fingerprint(parameter) if parameter.nbytes > _LARGE else parameter.detach().clone()


def _differs(value: Tensor | int, parameter: Tensor) -> bool:
    return fingerprint(parameter) != value if isinstance(value, int) else not same_values(value, parameter)


def _form(buffer: Tensor | None) -> Any:
    return None if buffer is None else (buffer.shape, buffer.dtype)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def _are_same(values: list[Any], others: list[Any]) -> bool:
    # The same number is nan on both ranks before a first measurement, say.
    pairs = zip(values, others, strict=False)
    return len(values) == len(others) and all(one == other or (one != one and other != other) for one, other in pairs)


def _settings(optimizer: Optimizer) -> list[Any]:
    return [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]


def _settings_of_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _state(optimizer: Optimizer) -> list[Any]:
    states = (state.values() if isinstance(state, dict) else (state,) for state in optimizer.state.values())
    return [*chain.from_iterable(states)]


def _versioned(values: list[Any]) -> tuple[list[Any], list[int]]:
    return values, versions_of(values)


def _have_changed(before: tuple[list[Any], list[int]], after: tuple[list[Any], list[int]]) -> bool:
    return before[1] != after[1] or not all(map(is_, before[0], after[0]))


def _load(optimizer: Optimizer, values: dict[str, Any], own: Set[Tensor]) -> None:
    """Load the state of an optimizer, but for parameters that belong to this rank alone."""
    kept: dict[Tensor, Any] = {
        parameter: optimizer.state.pop(parameter) for parameter in own if parameter in optimizer.state
    }
    optimizer.load_state_dict(values)
    for parameter in own:
        optimizer.state.pop(parameter, None)
    optimizer.state.update(kept)


def _described(gradient: Tensor | None) -> tuple[int, Tensor] | None:
    """Return the number of a gradient's sparse dimensions, and its elements."""
    if gradient is None:
        return None
    return (gradient.sparse_dim(), gradient.to_dense()) if gradient.is_sparse else (0, gradient)


def _restored(parameter: Tensor, sparse_dim: int, gradient: Tensor) -> Tensor:
    dense = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
    return dense.to_sparse(sparse_dim) if sparse_dim else dense

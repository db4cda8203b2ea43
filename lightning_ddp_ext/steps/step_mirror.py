"""The effects of a step on ranks that did not run it: logged values, and the training state that it has changed."""

import json
import warnings
from collections.abc import Hashable, Sequence
from functools import cache, partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric, MetricCollection

from lightning_ddp_ext._compat.lightning_loops import manual_step_progress
from lightning_ddp_ext._compat.torch import TensorVersions, are_identical, equal_or_nan, find_ignored, version_of
from lightning_ddp_ext._lightning import LightningModule, Trainer
from lightning_ddp_ext.batches.containers import is_record
from lightning_ddp_ext.consistency import checksums
from lightning_ddp_ext.distributed.exchange import broadcast_bytes
from lightning_ddp_ext.distributed.serialization import name_skipped, pack, unpack
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.reducer.buckets import overwrite
from lightning_ddp_ext.reducer.buffer_synchronizer import find_different
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from lightning_ddp_ext.steps.logged_values import LoggedValues
from lightning_ddp_ext.steps.step_guard import StepGuard

_CODE = (type, FunctionType, BuiltinFunctionType, partial)  # the same on every rank
_PLAIN = (type(None), bool, int, float, complex, str, bytes, numpy.generic, torch.dtype, torch.device)
_SILENT = (list, tuple, set, LRScheduler)
_LARGE = 2**20  # bytes of a parameter from which checksums replace a copy
_LARGEST_DICTIONARY = 64  # entries that are compared
_PARAMETER = "a parameter"

Attribute = tuple[str | int, str]  # the path of a module or the number of an optimizer, and the name of the attribute


class StepBroadcast:
    """Sends the effects of an uneven step from the first active rank to the ranks that have joined.

    Every rank calls `send` or `receive`, as all take part in the broadcast.
    """

    def __init__(self, group: dist.ProcessGroup, logged: LoggedValues, mirror: "StepMirror | None") -> None:
        self.mirror = mirror  # None unless the Trainer is fitting
        self._group = group
        self._rank = dist.get_rank(group)
        self._logged = logged

    def remember(self, active: Sequence[int]) -> None:
        """Remember the state before a training step, if this rank will send what the step has changed."""
        if self._rank == active[0] and self.mirror is not None:
            self.mirror.remember()

    def send(self, active: Sequence[int], guard: StepGuard | None, has_ended: bool) -> None:
        """Send the effects of a step that `has_ended`, else announce a backward pass. Call on each active rank.

        `guard` is given in training.
        """
        if self._rank != active[0]:
            self._read(active[0])
            return
        message: dict[str, Any] = {"logged": self._logged.describe() if has_ended else None}
        if guard is not None:  # joined ranks make no manual steps
            message["steps"] = [guard.steps, guard.optimizers, None if has_ended else guard.numbers()[1]]
        changes = {} if guard is None or self.mirror is None or not has_ended else self.mirror.changes()
        message["has_changes"] = bool(changes)
        text = bytearray(json.dumps(message).encode())
        broadcast_bytes(torch.frombuffer(text, dtype=torch.uint8), self._group, active[0])
        if changes:
            broadcast_bytes(pack_effects(changes), self._group, active[0])

    def receive(self, active: Sequence[int], guard: StepGuard | None = None) -> bool:
        """Receive on a joined rank what `send` sends; take over the effects of a step and return True if it ended."""
        message, changes = self._read(active[0])
        if guard is not None:
            guard.steps, guard.optimizers, guard.announced = message["steps"]
        if message["logged"] is None:
            return False
        self._logged.adopt(message["logged"])
        if changes is not None and self.mirror is not None:
            self.mirror.take(unpack(changes)[0])
        return True

    def _read(self, source: int) -> tuple[dict[str, Any], Tensor | None]:
        """Take part in the broadcasts of `send` on another rank; return the message, and the changes if any."""
        message = json.loads(broadcast_bytes(None, self._group, source).cpu().numpy().tobytes())
        return message, broadcast_bytes(None, self._group, source) if message["has_changes"] else None


def pack_effects(changes: dict[str, Any]) -> Tensor:
    """Serialise the training state that a step has changed."""
    packed = pack(changes)
    if packed.skipped:
        raise UnsupportedFeatureError(
            "ranks without data need the state of optimizers and schedulers that `training_step` changes, and it holds"
            f" {name_skipped(packed.skipped)}, which is neither a number nor a tensor. Change it in a hook that all"
            " ranks run, such as `on_train_batch_start`."
        )
    return packed.data


class StepMirror:
    """Finds the training state that a training step has changed, and sets it on ranks that did not run the step.

    This is the state that Lightning, the reducer and torchmetrics do not keep equal: parameters, shapes of buffers,
    settings and state of optimizers, schedulers, and numbers and text of modules and optimizers. Under manual
    optimization it includes gradients, the gradient scaler and the number of steps.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, reducer: GradientReducer) -> None:
        self._trainer = trainer
        self._module = module
        self._reducer = reducer
        self._has_warned = False

    def _read_module(self) -> None:
        """Read the modules and parameters, of which a step may make others."""
        metrics = [part for part in self._module.modules() if isinstance(part, Metric | MetricCollection)]
        in_metrics = {id(part) for metric in metrics for part in metric.modules()}
        self._parts: dict[str, nn.Module] = {
            name: part for name, part in self._module.named_modules() if id(part) not in in_metrics
        }
        self._ignored = find_ignored(self._module)
        self._parameters = {name: one for name, one in self._module.named_parameters() if name not in self._ignored}

    @torch.no_grad()
    def remember(self) -> None:
        """Remember the state before a step, on a rank that runs it."""
        self._read_module()
        self._structure, self._known_parts = self._find_structure(), self._parts
        # A change through `.data` has no version, so values are compared.
        self._values = {
            name: (one.requires_grad, _form(one), _content(one).clone()) for name, one in self._parameters.items()
        }
        self._forms = {name: _form(buffer) for name, buffer in self._buffers().items()}
        self._entries = self._attributes()
        self._traces = {attribute: _trace(value) for attribute, value in self._entries.items()}
        self._optimizers = [
            (TensorVersions(_settings(one)), TensorVersions(_state(one))) for one in self._trainer.optimizers
        ]
        self._schedules = {key: [*vars(scheduler).values()] for key, scheduler in self._schedulers().items()}

    @torch.no_grad()
    def changes(self) -> dict[str, Any]:
        """Return the changes since `remember`, which `pack` serialises."""
        has_other_parts = not are_identical(self._structure, self._find_structure())
        if has_other_parts:
            self._read_module()
        is_manual = not self._module.automatic_optimization
        found: dict[str, Any] = {
            "structure": self._describe(with_modules=has_other_parts) if has_other_parts or is_manual else None,
            "buffers": self._changed_buffers(),
            "attributes": self._changed_attributes(),
            "parameters": self._changed_parameters(),
            "optimizers": self._changed_optimizers(),
            "schedulers": {
                key: _without_code(scheduler.state_dict())
                for key, scheduler in self._schedulers().items()
                if not are_identical(self._schedules.get(key, []), vars(scheduler).values())
            },
        }
        state = {name: value for name, value in found.items() if value}
        return {**state, **(self._state_after_manual_step() if is_manual else {})}

    @torch.no_grad()
    def take(self, state: dict[str, Any]) -> None:
        """Set the state that has changed on the rank that has run the step."""
        self._read_module()
        for name, (requires_grad, value) in state.get("parameters", {}).items():
            self._set_parameter(name, value, requires_grad)
        self._check_structure(state.get("structure", {}))
        for name, value in state.get("buffers", {}).items():
            self._set_buffer(name, value)
        for attribute, before, after in state.get("attributes", ()):
            self._set_attribute(attribute, before, after)
        for number, (groups, values) in state.get("optimizers", {}).items():
            self._set_optimizer(self._trainer.optimizers[number], groups, values)
        schedulers = self._schedulers()
        for key, values in state.get("schedulers", {}).items():
            if key not in schedulers:
                raise self._missing(f"the scheduler `self.{key}`")
            schedulers[key].load_state_dict(values)
        if "progress" in state:
            self._trainer.precision_plugin.load_state_dict(state["precision"])
            manual_step_progress(self._trainer).load_state_dict(state["progress"])
            for name, gradient in state["gradients"].items():
                parameter = self._parameters[name]
                parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _find_structure(self) -> list[Any]:
        return [one for part in self._parts.values() for one in (*part._modules.values(), *part._parameters.values())]

    def _describe(self, with_modules: bool) -> dict[str, str]:
        """Return a description of each parameter, and of each module, by name."""
        modules = {name: f"a module of class `{type(part).__name__}`" for name, part in self._parts.items()}
        return {**(modules if with_modules else {}), **dict.fromkeys(self._parameters, _PARAMETER)}

    def _check_structure(self, described: dict[str, str]) -> None:
        """Refuse other parameters than on this rank, and modules of other classes than modules of this rank."""
        own = self._describe(with_modules=True)
        for name in (*described, *self._parameters) if described else ():
            is_relevant = name in own or described[name] == _PARAMETER
            if is_relevant and own.get(name) != described.get(name):
                raise UnsupportedFeatureError(
                    f"rank {self._trainer.global_rank}: after `training_step` on a rank with data, `{name}` is"
                    f" {described.get(name, 'missing')}, and on this rank without data it is"
                    f" {own.get(name, 'missing')}. Change modules in a hook that all ranks run, such as"
                    " `on_train_batch_start`."
                )

    def _attributes(self) -> dict[Attribute, Any]:
        """Return the attributes of modules and optimizers that these do not have from their bases."""
        owners: list[tuple[str | int, Any]] = [*self._parts.items(), *enumerate(self._trainer.optimizers)]
        return {
            (owner, name): value
            for owner, one in owners
            for name, value in vars(one).items()
            if name not in _inherited(isinstance(owner, int))
        }

    def _buffers(self) -> dict[str, Tensor | None]:
        named = (
            (f"{path}.{leaf}".lstrip("."), buffer)
            for path, part in self._parts.items()
            for leaf, buffer in part._buffers.items()
        )
        return {name: buffer for name, buffer in named if name not in self._ignored}

    def _schedulers(self) -> dict[int | str, LRScheduler]:
        """Return the schedulers that Lightning steps by number, and the module's own by the names of its attributes."""
        schedulers: dict[int | str, LRScheduler] = {
            number: config.scheduler for number, config in enumerate(self._trainer.lr_scheduler_configs)
        }
        return schedulers | {name: one for name, one in vars(self._module).items() if isinstance(one, LRScheduler)}

    def _changed_parameters(self) -> dict[str, tuple[bool, Tensor]]:
        alike = {
            name: (self._values[name][2], _content(one))
            for name, one in self._parameters.items()
            if name in self._values and self._values[name][:2] == (one.requires_grad, _form(one))
        }
        differ = dict(zip(alike, find_different(list(alike.values())), strict=True))
        return {name: (one.requires_grad, one) for name, one in self._parameters.items() if differ.get(name, True)}

    def _changed_buffers(self) -> dict[str, Tensor | None]:
        """Return the buffers with another shape or dtype, whose values the reducer does not make equal."""
        is_manual = not self._module.automatic_optimization  # means may change after the last backward pass
        return {
            name: one
            for name, one in self._buffers().items()
            if self._forms.get(name, _form(one)) != _form(one)
            or (is_manual and (one is None or one.is_floating_point()))
        }

    def _changed_attributes(self) -> list[tuple[Attribute, list[Any], list[Any]]]:
        """Return each changed plain attribute with its values before and after; no value is an empty list."""
        sent, attributes = [], self._attributes()
        for attribute in {**self._entries, **attributes}:
            old, new = ([values[attribute]] if attribute in values else [] for values in (self._entries, attributes))
            is_known = isinstance(attribute[0], int) or attribute[0] in self._known_parts
            if is_known and not are_identical(old, new) and _is_plain((*old, *new)):
                sent.append((attribute, old, new))
        self._warn_of_others(attributes)
        return sent

    def _warn_of_others(self, attributes: dict[Attribute, Any]) -> None:
        """Warn once of a changed attribute that is not sent, except containers and graphs, which come from batches."""
        for attribute, value in attributes.items():
            owner, name = attribute
            old, is_dictionary = self._entries.get(attribute), isinstance(value, dict)
            silent = (isinstance(value, _SILENT) and not is_record(value)) or getattr(value, "requires_grad", False)
            # Submodules of libraries keep objects of a batch in attributes, but rarely numbers in dictionaries.
            if self._has_warned or silent or isinstance(owner, int) or (owner and not is_dictionary):
                continue
            is_same = (value is old or is_dictionary) and _trace(value) == self._traces.get(attribute, {})
            if is_same or _is_plain((old, value)):
                continue
            self._has_warned, path = True, ".".join(filter(None, ("self", owner, name)))
            warnings.warn(
                f"rank {self._trainer.global_rank}: `training_step` changes `{path}`, of type"
                f" `{type(value).__name__}`, which ranks that have run out of data keep as it was. If training depends"
                " on it, register it as a buffer, or make it a number of the module.",
                stacklevel=2,
            )

    def _changed_optimizers(self) -> dict[int, tuple[list[dict[str, Any]], dict[str, Any]]]:
        """Return the settings and the state of each changed optimizer; the state is empty if only settings changed."""
        found = {}
        for number, (optimizer, (settings, state)) in enumerate(
            zip(self._trainer.optimizers, self._optimizers, strict=True)
        ):
            # A manual step may change state in any depth, such as in a list, which has no version.
            has_state = not self._module.automatic_optimization or bool(state.changed(_state(optimizer)))
            if has_state or settings.changed(_settings(optimizer)):
                values = _without_code(optimizer.state_dict(), "param_groups") if has_state else {}
                found[number] = [_without_code(group, "params") for group in optimizer.param_groups], values
        return found

    def _state_after_manual_step(self) -> dict[str, Any]:
        accumulates = self._reducer.has_unsynchronized(self._parameters.values())  # each rank keeps its own gradients
        return {
            "precision": self._trainer.precision_plugin.state_dict(),
            "progress": manual_step_progress(self._trainer).state_dict(),
            "gradients": {} if accumulates else {name: one.grad for name, one in self._parameters.items()},
        }

    def _set_parameter(self, name: str, value: Tensor, requires_grad: bool) -> None:
        parameter = self._parameters.get(name)
        if parameter is None or parameter.shape != value.shape:
            raise self._missing(f"the parameter `{name}`, of shape {list(value.shape)}")
        if parameter.numel():
            overwrite([parameter], value.to(parameter.device, parameter.dtype).reshape(-1))
        parameter.requires_grad_(requires_grad)

    def _set_buffer(self, name: str, value: Tensor | None) -> None:
        path, _, leaf = name.rpartition(".")
        part = self._part(path)
        own = part._buffers.get(leaf)
        if value is None:
            part._buffers[leaf] = None
        elif own is not None and _form(own) == _form(value):
            own.copy_(value)
        else:
            # Parts of the LightningModule may be on other devices.
            beside = () if part is self._module else (*part.parameters(), *part.buffers())
            place = next((one for one in (own, *beside) if one is not None), self._module)
            part._buffers[leaf] = value.to(place.device)

    def _set_attribute(self, attribute: Attribute, before: list[Any], after: list[Any]) -> None:
        """Set an attribute that was the same on both ranks; any other attribute belongs to its rank."""
        owner, name = attribute
        values = vars(self._trainer.optimizers[owner] if isinstance(owner, int) else self._part(owner))
        own = [values[name]] if name in values else []
        if not _is_plain((*own,)) or len(own) != len(before) or not all(map(equal_or_nan, own, before)):
            return
        if after:
            values[name] = after[0]
        else:
            del values[name]

    def _part(self, name: str) -> nn.Module:
        part = self._parts.get(name)
        if part is None:
            raise self._missing(f"the module `{name}`")
        return part

    def _missing(self, made: str) -> UnsupportedFeatureError:
        return UnsupportedFeatureError(
            f"rank {self._trainer.global_rank}: `training_step` on a rank with data has made {made}, and this rank"
            " without data has none like it. Create it in `__init__`, `configure_model` or `setup` of the module."
        )

    def _set_optimizer(self, optimizer: Optimizer, groups: list[dict[str, Any]], state: dict[str, Any]) -> None:
        """Set the settings of an optimizer and its state, except for parameters that each rank has for itself."""
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
        if not state:
            return
        excluded = set(self._module.parameters()).difference(self._parameters.values())
        kept: dict[Tensor, Any] = {one: optimizer.state.pop(one) for one in excluded if one in optimizer.state}
        optimizer.load_state_dict({**state, "param_groups": optimizer.state_dict()["param_groups"]})
        for parameter in excluded:
            optimizer.state.pop(parameter, None)
        optimizer.state.update(kept)


@cache
def _inherited(is_optimizer: bool) -> frozenset[str]:
    """Return the attributes that modules, or optimizers, have from their bases."""
    base = torch.optim.SGD([torch.zeros(())]) if is_optimizer else LightningModule()
    return frozenset(vars(base)) - {"training"}


def _form(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def _content(parameter: Tensor) -> Tensor:
    """Return the values of a parameter, or their checksums if there are many."""
    return checksums([parameter], parameter.device) if parameter.nbytes > _LARGE else parameter.detach()


def _trace(value: Any) -> Any:
    """Return what a change in place changes: the version of a tensor, and the numbers and text of a dictionary."""
    if isinstance(value, Tensor):
        return version_of(value)
    is_compared = isinstance(value, dict) and len(value) <= _LARGEST_DICTIONARY
    return {key: one for key, one in value.items() if _is_plain(one)} if is_compared else {}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def _without_code(entries: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the entries that are not code, except for some names."""
    return {name: value for name, value in entries.items() if name not in names and not isinstance(value, _CODE)}


def _settings(optimizer: Optimizer) -> list[Any]:
    return [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]


def _state(optimizer: Optimizer) -> list[Any]:
    states = (state.values() if isinstance(state, dict) else (state,) for state in optimizer.state.values())
    return [*chain.from_iterable(states)]

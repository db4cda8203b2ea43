"""The effects of a step on ranks that did not run it: logged values, and the training state that it has changed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, compress
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
from lightning_ddp_ext._compat.torch import TensorVersions, bits_of, checksums, equal_or_nan, find_ignored, read_all
from lightning_ddp_ext._lightning import LightningModule, Trainer
from lightning_ddp_ext.batches.containers import is_record
from lightning_ddp_ext.distributed.exchange import broadcast_bytes
from lightning_ddp_ext.distributed.serialization import name_skipped, pack, unpack
from lightning_ddp_ext.errors import UnsupportedFeatureError, WarnOnce
from lightning_ddp_ext.reducer.buckets import overwrite
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from lightning_ddp_ext.steps.logged_values import LoggedValues
from lightning_ddp_ext.steps.optimizer_guard import OptimizerGuard

_CODE = (type, FunctionType, BuiltinFunctionType, partial)  # the same on every rank
_PLAIN = (type(None), bool, int, float, complex, str, bytes, numpy.generic, torch.dtype, torch.device)
_SILENT = (list, tuple, set, LRScheduler)
_LARGEST_DICTIONARY = 64  # entries that are compared
_LARGE = 2**17  # bytes of a parameter from which a checksum replaces a copy
_MISSING = "missing"
_END = b"\n"  # of the JSON in a message
Attribute = tuple[str | int, str]  # the path of a module or the number of an optimizer, and the name of the attribute
Plain = tuple[Any, ...]  # a number or text, or nothing


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

    def send(self, active: Sequence[int], guard: OptimizerGuard | None, has_ended: bool) -> None:
        """Send the effects of a step that `has_ended`, else announce a backward pass. Call on each active rank.

        `guard` is given in training.
        """
        if self._rank != active[0]:
            broadcast_bytes(None, self._group, active[0])
            return
        message: dict[str, Any] = {"logged": self._logged.describe() if has_ended else None}
        if guard is not None:  # joined ranks make no manual steps
            message["steps"] = [guard.steps, guard.optimizers, None if has_ended else guard.numbers()[1]]
        data = torch.frombuffer(bytearray(json.dumps(message).encode() + _END), dtype=torch.uint8)
        changes = {} if guard is None or self.mirror is None or not has_ended else self.mirror.changes()
        broadcast_bytes(torch.cat([data, pack_effects(changes)]) if changes else data, self._group, active[0])

    def receive(self, active: Sequence[int], guard: OptimizerGuard | None = None) -> bool:
        """Receive on a joined rank what `send` sends; take over the effects of a step and return True if it ended."""
        text, _, changes = broadcast_bytes(None, self._group, active[0]).cpu().numpy().tobytes().partition(_END)
        message = json.loads(text)
        if guard is not None:
            guard.steps, guard.optimizers, guard.announced = message["steps"]
        if message["logged"] is None:
            return False
        self._logged.adopt(message["logged"])
        if changes and self.mirror is not None:
            self.mirror.take(unpack(torch.frombuffer(bytearray(changes), dtype=torch.uint8))[0])
        return True


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


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the training state, of this rank.

    `form` has to be the same on a rank that takes the part, and `mark` differs after a change. `value` returns what is
    sent, given the mark from before the step, and `take` sets it.
    """

    form: str
    mark: Any
    value: Callable[[Any], Any]
    take: Callable[[Any], object]


class StepMirror:
    """Finds the training state that a training step has changed, and sets it on ranks that did not run the step.

    This is the state that Lightning, the reducer and torchmetrics do not keep equal: parameters, shapes of buffers,
    settings and state of optimizers, schedulers, and numbers and text of the LightningModule and of optimizers. Under
    manual optimization it includes gradients, the gradient scaler and the number of steps.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, reducer: GradientReducer) -> None:
        self._trainer = trainer
        self._module = module
        self._reducer = reducer
        self._warn = WarnOnce()

    def remember(self) -> None:
        """Remember the state before a step, on a rank that runs it."""
        parameters = self._parameters()
        self._before, self._attributes_before = self._read(parameters), self._attributes()
        self._contents_before = _contents(parameters)

    @torch.no_grad()
    def changes(self) -> dict[str, Any]:
        """Return the changes since `remember`, which `pack` serialises."""
        parameters = self._parameters()
        parts, rewritten = self._read(parameters), self._rewritten(parameters)
        found: dict[str, tuple[str, Any]] = {name: (_MISSING, None) for name in self._before if name not in parts}
        for name, part in parts.items():
            before = self._before.get(name)
            has_value = before is None or before.mark != part.mark or name in rewritten
            value = part.value(None if before is None else before.mark) if has_value else None
            if value or before is None or before.form != part.form:
                found[name] = part.form, value
        changes = {"parts": found, "attributes": self._changed_attributes()}
        return {name: values for name, values in changes.items() if values}

    @torch.no_grad()
    def take(self, changes: dict[str, Any]) -> None:
        """Set the state that has changed on the rank that has run the step."""
        own = self._read(self._parameters()) if changes else {}
        for name, (form, value) in changes.get("parts", {}).items():
            present = own[name].form if name in own else _MISSING
            # A step may make modules without parameters, such as losses, on ranks with data only.
            if form != present and (value or _MISSING not in (form, present) or name.startswith("parameter")):
                raise UnsupportedFeatureError(
                    f"rank {self._trainer.global_rank}: after `training_step` on a rank with data, {name} is {form},"
                    f" and on this rank without data it is {present}. Create, replace and remove it in `__init__`,"
                    " `configure_model` or `setup`, or in a hook that all ranks run, such as `on_train_batch_start`."
                )
        for name, (_, value) in changes.get("parts", {}).items():
            if value:
                own[name].take(value)
        for attribute in changes.get("attributes", ()):
            self._take_attribute(*attribute)

    def _parameters(self) -> dict[str, nn.Parameter]:
        ignored = find_ignored(self._module)
        return {f"parameter `{name}`": one for name, one in self._module.named_parameters() if name not in ignored}

    def _rewritten(self, parameters: dict[str, nn.Parameter]) -> set[str]:
        """Return the names of parameters whose contents differ; all of those copied together if one is new."""
        now, before = _contents(parameters), self._contents_before
        common = [names for names in now if names in before and now[names].shape == before[names].shape]
        found = {name for names in now if names not in common for name in names}
        for names in compress(common, read_all([(now[names] != before[names]).any() for names in common])):
            own = [one.reshape(-1) for one in (now[names], before[names])]  # integers of one size
            sizes = [parameters[name].nbytes // own[0].element_size() for name in names] if len(names) > 1 else [1]
            pairs = zip(*(torch.split(one, sizes) for one in own), strict=True)
            found.update(name for name, pair in zip(names, pairs, strict=True) if not torch.equal(*pair))
        return found

    def _read(self, parameters: dict[str, nn.Parameter]) -> dict[str, _Part]:
        """Read the parts of the training state by name, of which a step may make others."""
        module, is_manual, ignored = self._module, not self._module.automatic_optimization, find_ignored(self._module)
        excluded = {*module.parameters()}.difference(parameters.values()) if ignored else set()
        found = {name: _parameter(one) for name, one in parameters.items()}
        for name, part in module.named_modules():
            buffers = {leaf: one for leaf, one in part._buffers.items() if f"{name}.{leaf}".strip(".") not in ignored}
            found[f"module `{name}`"] = _buffers(part, buffers, module)
        for number, optimizer in enumerate(self._trainer.optimizers):
            found[f"optimizer {number} ({type(optimizer).__name__})"] = _optimizer(optimizer, excluded, is_manual)
        for position, config in enumerate(self._trainer.lr_scheduler_configs):
            found[f"scheduler {position}"] = _scheduler(config.scheduler)
        for name, value in vars(module).items():
            if isinstance(value, LRScheduler):
                found[f"scheduler `self.{name}`"] = _scheduler(value)
        if is_manual:
            found["manual step"] = self._manual_step(parameters)
        return found

    def _manual_step(self, parameters: dict[str, nn.Parameter]) -> _Part:
        precision, progress = self._trainer.precision_plugin, manual_step_progress(self._trainer)

        def value(before: Any) -> Any:
            accumulates = self._reducer.has_unsynchronized(parameters.values())  # each rank keeps its own gradients
            gradients = {} if accumulates else {name: one.grad for name, one in parameters.items()}
            return precision.state_dict(), progress.state_dict(), gradients

        def take(sent: Any) -> None:
            precision.load_state_dict(sent[0])
            progress.load_state_dict(sent[1])
            for name, gradient in sent[2].items():
                parameters[name].grad = None if gradient is None else gradient.to(parameters[name].device)

        return _Part("", object(), value, take)

    def _attributes(self) -> dict[Attribute, Any]:
        """Return what shows a change of the attributes that modules and optimizers do not have from their bases."""
        parts = [*self._module.named_modules()]
        metrics = (part for _, part in parts if isinstance(part, Metric | MetricCollection))
        in_metrics = {id(part) for metric in metrics for part in metric.modules()}
        parts = [(name, part) for name, part in parts if id(part) not in in_metrics]
        return {
            (owner, name): mark
            for owner, one in (*parts, *enumerate(self._trainer.optimizers))
            for name, value in vars(one).items()
            if name not in _inherited(isinstance(owner, int)) and (mark := _mark(value, is_own=owner == "")) is not None
        }

    def _changed_attributes(self) -> list[tuple[Attribute, Plain, Plain]]:
        """Return each changed attribute that is followed, with its values before and after; warn once of others."""
        sent, now = [], self._attributes()
        for attribute in {**self._attributes_before, **now}:
            old, new = self._attributes_before.get(attribute, ()), now.get(attribute, ())
            owner, name = attribute
            if old == new:
                continue
            if isinstance(old, tuple) and isinstance(new, tuple) and (owner == "" or isinstance(owner, int)):
                sent.append((attribute, old, new))
            elif new != () and (old != () or owner == ""):
                path = ".".join(filter(None, ("self", str(owner), name)))
                self._warn(
                    f"rank {self._trainer.global_rank}: `training_step` changes `{path}`, which ranks that have run out"
                    " of data keep as it was. If training depends on it, register it as a buffer, or make it a number"
                    " of the LightningModule."
                )
        return sent

    def _take_attribute(self, attribute: Attribute, before: Plain, after: Plain) -> None:
        """Set an attribute that was the same on both ranks; any other attribute belongs to its rank."""
        owner, name = attribute
        values = vars(self._trainer.optimizers[owner] if isinstance(owner, int) else self._module)
        own = (values[name],) if name in values else ()
        if _is_plain(own) and len(own) == len(before) and all(map(equal_or_nan, own, before)):
            values.pop(name, None)
            values.update(zip([name], after, strict=False))  # nothing if the attribute has been deleted


def _contents(parameters: dict[str, nn.Parameter]) -> dict[tuple[str, ...], Tensor]:
    """Return the contents of parameters by their names, as a change through `.data` increases no version.

    Small parameters are copied together, since a hundred operations take milliseconds; large ones have checksums.
    """
    small: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    found: dict[tuple[str, ...], Tensor] = {}
    for name, one in parameters.items():
        if one.nbytes <= _LARGE:
            small.setdefault((one.dtype, one.device), []).append(name)
        else:
            found[(name,)] = checksums([one])[0]
    for names in small.values():
        found[tuple(names)] = bits_of(torch.cat([parameters[name].detach().reshape(-1) for name in names]))
    return found


def _parameter(one: nn.Parameter) -> _Part:
    def take(sent: Any) -> None:
        requires_grad, value = sent
        if one.numel():
            overwrite([one], value.to(one.device).reshape(-1))
        one.requires_grad_(requires_grad)

    return _Part(_form(one), one.requires_grad, lambda before: (one.requires_grad, one), take)


def _buffers(owner: nn.Module, buffers: dict[str, Tensor | None], root: LightningModule) -> _Part:
    """Return the buffers with another shape or dtype, whose values the reducer does not make equal."""
    forms = {leaf: None if one is None else _form(one) for leaf, one in buffers.items()}
    # Means may change after the last backward pass of a manual step.
    is_manual = not root.automatic_optimization
    late = {leaf for leaf, one in buffers.items() if is_manual and one is not None and one.is_floating_point()}

    def value(before: Any) -> Any:
        known = {} if before is None else before[0]
        return {leaf: buffers[leaf] for leaf in known.keys() & forms if leaf in late or known[leaf] != forms[leaf]}

    def take(sent: dict[str, Tensor | None]) -> None:
        for leaf, one in sent.items():
            own = owner._buffers.get(leaf)
            if own is not None and one is not None and _form(own) == _form(one):
                own.copy_(one)
            else:
                # Parts of the LightningModule may be on other devices.
                beside = () if owner is root else (*owner.parameters(), *owner.buffers())
                place = next((other for other in (own, *beside) if other is not None), root)
                owner._buffers[leaf] = None if one is None else one.to(place.device)

    return _Part(f"`{type(owner).__name__}`", (forms, object() if late else None), value, take)


def _optimizer(one: Optimizer, excluded: set[nn.Parameter], is_manual: bool) -> _Part:
    """Return the settings of an optimizer, and its state except for parameters that each rank has for itself."""
    states = (state.values() if isinstance(state, dict) else (state,) for state in one.state.values())
    state = TensorVersions([*chain.from_iterable(states)])
    settings = TensorVersions(
        [value for group in one.param_groups for name, value in group.items() if name != "params"]
    )

    def value(before: Any) -> Any:
        # A manual step may change state in any depth, such as in a list, which has no version.
        has_state = is_manual or before is None or before[1] != state
        groups = [_without_code(group, "params") for group in one.param_groups]
        return groups, _without_code(one.state_dict(), "param_groups") if has_state else {}

    def take(sent: Any) -> None:
        for own, values in zip(one.param_groups, sent[0], strict=True):
            for name, value in values.items():
                is_tensor = isinstance(value, Tensor) and isinstance(own.get(name), Tensor)
                own[name] = value.to(own[name].device) if is_tensor else value
        if sent[1]:
            kept: dict[Tensor, Any] = {other: one.state.pop(other) for other in excluded if other in one.state}
            one.load_state_dict({**sent[1], "param_groups": one.state_dict()["param_groups"]})
            for other in excluded:
                one.state.pop(other, None)
            one.state.update(kept)

    form = f"of {len(one.param_groups)} parameter groups"
    return _Part(form, (settings, state, object() if is_manual else None), value, take)


def _scheduler(one: LRScheduler) -> _Part:
    mark = TensorVersions([*vars(one).values()])
    return _Part(f"`{type(one).__name__}`", mark, lambda before: _without_code(one.state_dict()), one.load_state_dict)


@cache
def _inherited(is_optimizer: bool) -> frozenset[str]:
    """Return the attributes that modules, or optimizers, have from their bases."""
    base = torch.optim.SGD([torch.zeros(())]) if is_optimizer else LightningModule()
    return frozenset(vars(base)) - {"training"}


def _mark(value: Any, is_own: bool) -> Any:
    """Return what a change of an attribute changes: the value in a tuple if it is plain; None for values of batches.

    Submodules of libraries keep objects of a batch in attributes, but rarely numbers in dictionaries; `is_own` is True
    for attributes of the LightningModule.
    """
    if _is_plain(value):
        return (value,)
    if isinstance(value, dict):
        return {key: one for key, one in value.items() if _is_plain(one)} if len(value) <= _LARGEST_DICTIONARY else None
    is_of_batch = (isinstance(value, _SILENT) and not is_record(value)) or getattr(value, "requires_grad", False)
    return TensorVersions([value]) if is_own and not is_of_batch else None


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {[*tensor.shape]}"


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def _without_code(entries: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the entries that are not code, except for some names."""
    return {name: value for name, value in entries.items() if name not in names and not isinstance(value, _CODE)}

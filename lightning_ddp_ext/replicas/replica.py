"""Replicas of a module on several devices."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_ddp_ext._compat.lightning import REPLICA_ATTRIBUTES, adopt_device
from lightning_ddp_ext._compat.torch import (
    HOOKS,
    STRUCTURE,
    TensorVersions,
    add_all_,
    are_identical,
    copy_mixed_,
    has_gradient_hooks,
    versions_of,
)
from lightning_ddp_ext._compat.torchmetrics import forget_compute_groups, move_keeping_dtype
from lightning_ddp_ext.consistency import fingerprint_all
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.reducer.buckets import send_all
from lightning_ddp_ext.reducer.buffer_synchronizer import same_values
from lightning_ddp_ext.replicas.attribute_copies import References

AttributePlace = tuple[int, str]  # position of a module in the tree, and name of its attribute

_FORM, _REQUIRES_GRAD = attrgetter("shape", "dtype"), attrgetter("requires_grad")

# Dictionaries of torch that replicas share. Dictionaries of hooks are copied: a hook that a step registers on a replica
# must not run on another replica.
SHARED = (REPLICA_ATTRIBUTES | vars(nn.Module()).keys()).difference(HOOKS)
_LEARNING = 3  # training steps in which buffers are compared by value


class Replica:
    """One copy of the master's module tree; on the master's device, its parameters share memory with the master's."""

    def __init__(self, master: nn.Module, home: torch.device, device: torch.device) -> None:
        self.device = device
        self._home = home
        self.references = References(home, device)
        self.parameters: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.leaves: list[nn.Parameter] = []  # the second of each pair, the replica's own parameters
        self.modules: list[tuple[nn.Module, nn.Module]] = []
        for original in master.modules():
            if self.references.find(original) is None:
                self._add_module(original)
        for original, own in self.modules:
            self._fill(original, own)
        for original, own in self.modules:
            for name, value in original.__dict__.items():
                if name not in STRUCTURE:
                    self.set_attribute(own, name, value)
        self.module: nn.Module = self.references.find(master)  # type: ignore[assignment]
        adopt_device(self.module, device)
        self._flatten_recurrent()

    def _flatten_recurrent(self) -> None:
        """Put the weights of LSTMs and GRUs into one piece of memory each, which cuDNN otherwise does in every call."""
        for _, own in self.modules:
            if isinstance(own, nn.RNNBase) and self.device != self._home:
                own.flatten_parameters()

    def set_attribute(self, own: nn.Module, name: str, value: Any) -> None:
        """Give one of the replica's modules an attribute of the master's."""
        is_shared = name in SHARED or self.references.is_data(value)
        own.__dict__[name] = value if is_shared else self.references.rewrite(value)

    def _add_module(self, original: nn.Module) -> None:
        if isinstance(original, Metric | MetricCollection):
            metric = _copy_metric(original, self.device)
            for part, own in zip(original.modules(), metric.modules(), strict=True):
                self.references.add(part, own)
            return
        own = original.__new__(type(original))
        own.__dict__ = dict(original.__dict__)
        self.references.add(original, own)
        self.modules.append((original, own))

    def _fill(self, original: nn.Module, own: nn.Module) -> None:
        makers: dict[str, Callable[[Any], Any]] = {"_parameters": self._add_parameter, "_buffers": self._add_buffer}
        for kind in ("_modules", *makers):
            own.__dict__[kind] = parts = type(original.__dict__[kind])()
            for name, part in original.__dict__[kind].items():
                found = self.references.find(part)
                parts[name] = makers[kind](part) if found is None and part is not None else found

    def _add_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        data = parameter.detach()
        own = data if data.device == self.device else data.to(self.device)
        leaf = own.as_subclass(type(parameter))
        leaf.requires_grad_(parameter.requires_grad)
        leaf.__dict__.update(parameter.__dict__)
        self.references.add(parameter, leaf)
        self.parameters.append((parameter, leaf))
        self.leaves.append(leaf)
        return leaf

    def _add_buffer(self, buffer: Tensor) -> Tensor:
        own = buffer.detach().clone().to(self.device)
        self.references.add(buffer, own)
        return own

    def list_buffers(self) -> list[AttributePlace]:
        """Return the places of the buffers that the replica has now."""
        return [(position, name) for position, (_, own) in enumerate(self.modules) for name in own._buffers]

    def forget_gradients(self) -> None:
        """Clear the gradients of the replica's parameters."""
        for leaf in self.leaves:
            leaf.grad = None

    def receive_parameters(self, values: Sequence[Tensor]) -> None:
        """Take over the values of the master's parameters, which are on the device of the replica."""
        if self.device != self._home:
            if [*map(_FORM, self.leaves)] != [*map(_FORM, values)]:
                for parameter, leaf in self.parameters:
                    leaf.data = torch.empty_like(parameter, device=self.device)
                self._flatten_recurrent()
            copy_mixed_(self.leaves, values)
        elif not all(map(Tensor.is_set_to, self.leaves, values)):
            # `parameter.data = ...` (weight averaging, resizing) ends the aliasing.
            for leaf, value in zip(self.leaves, values, strict=True):
                leaf.data = value.detach()

    def receive_buffers(self, places: Sequence[AttributePlace], values: Sequence[Tensor | None]) -> None:
        """Take over some of the master's buffers, which are on the device of the replica."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for (position, name), value in zip(places, values, strict=True):
            buffers = self.modules[position][1]._buffers
            target = buffers.get(name)
            if value is None:
                buffers[name] = None
            elif target is None or _FORM(target) != _FORM(value) or target.is_inference() or is_expanded(target):
                buffers[name] = value.detach().clone()
            else:
                targets.append(target)
                sources.append(value)
        copy_mixed_(targets, sources)


def is_expanded(tensor: Tensor) -> bool:
    """Return True if elements share memory, as after `Tensor.expand`, so that they cannot be written to."""
    return tensor.layout is torch.strided and 0 in tensor.stride()


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(_FORM(one) == _FORM(other)) and same_values(one, other)


def _copy_metric(metric: Metric | MetricCollection, device: torch.device) -> Metric | MetricCollection:
    """Return an empty copy of a metric, whose `update` is bound to the instance and would update the original."""
    # Hooks are shared: they may be bound to objects that lead to everything, the Trainer included.
    hooks = [part.__dict__[name] for part in metric.modules() for name in HOOKS]
    copied = move_keeping_dtype(copy.deepcopy(metric, {id(shared): shared for shared in hooks}), device)
    if isinstance(copied, MetricCollection):
        forget_compute_groups(copied)
    copied.reset()
    return copied


class Replicas(Sequence[Replica]):
    """The replicas of one module, kept between steps. The first device is the master's; a device may be repeated."""

    def __init__(self, master: nn.Module, devices: Sequence[torch.device]) -> None:
        self.master = master
        self._devices = list(devices)
        self._replicas: list[Replica] = []
        self._modules: list[nn.Module] = []
        self._parts: list[object] = []
        self._originals: list[nn.Parameter] = []
        self._places: list[AttributePlace] = []  # of the buffers
        self._last_step, self._training_steps = "", 0
        self.changing: set[AttributePlace] = set()  # buffers that may change without a new version
        self._sent_parameters = TensorVersions([])
        self._buffer_versions = TensorVersions([])
        self._own: dict[AttributePlace, TensorVersions] = {}  # the master's buffers; each replica keeps its own value
        self._pointers: list[int] = []

    def __len__(self) -> int:
        return len(self._devices)

    def __getitem__(self, index: Any) -> Any:
        return self._replicas[index]

    @property
    def prefixes(self) -> list[str]:
        """Name of each replicated module, with the dot that an attribute's name follows."""
        names = {id(module): f"{name}." if name else "" for name, module in self.master.named_modules()}
        return [names[id(module)] for module, _ in self._replicas[0].modules]

    @torch.no_grad()
    def refresh(self, step: str = "training_step") -> bool:
        """Bring every replica up to the master before a step; return True if the replicas were rebuilt."""
        parts = _list_parts(self._modules)
        if not parts or not are_identical(parts, self._parts):
            self._build()
            self._last_step, self._training_steps = step, int(step == "training_step")
            return True
        # Fused optimizers change parameters without a new version, and so do hooks through `.data`. Between two batches
        # of an evaluation, versions show the changes.
        is_continued, self._last_step = step == self._last_step != "training_step", step
        self._training_steps += step == "training_step"
        self._send_parameters(is_continued)
        if self._places:
            self._send_buffers(is_continued)
        return False

    @property
    def is_learning(self) -> bool:
        """True in the first training steps, which show the buffers that change without a new version."""
        return self._last_step == "training_step" and self._training_steps <= _LEARNING

    def _send_parameters(self, only_changed: bool) -> None:
        originals = self._originals
        trained = [*map(_REQUIRES_GRAD, originals)]
        for replica in self._replicas:
            if trained != [*map(_REQUIRES_GRAD, replica.leaves)]:
                for parameter, leaf in replica.parameters:
                    leaf.requires_grad_(parameter.requires_grad)
        if self._last_step != "training_step":
            pointers = [*map(Tensor.data_ptr, originals)]
            if only_changed and pointers == self._pointers and not self._sent_parameters.changed(originals):
                return
            self._sent_parameters, self._pointers = TensorVersions(originals), pointers
        self._send(originals, Replica.receive_parameters)

    def _send_buffers(self, only_changed: bool) -> None:
        number, buffers = len(self._places), self._all_buffers()
        stale = {position % number for position in self._buffer_versions.changed(buffers)}
        if self._own:
            masters = dict(zip(self._places, buffers, strict=False))  # the first ones
            for place in [place for place, seen in self._own.items() if seen.changed([masters[place]])]:
                del self._own[place]
        if self.is_learning:
            same = {*range(number)} - stale
            self.changing |= {self._places[n] for n in same if not _are_equal(buffers[number + n], buffers[n])}
        if self.changing and not only_changed:
            stale |= {n for n, place in enumerate(self._places) if place in self.changing}
        stale = {n for n in stale if self._places[n] not in self._own}
        if stale:
            places = [self._places[n] for n in stale]
            self._send([buffers[n] for n in stale], lambda replica, values: replica.receive_buffers(places, values))
            self._buffer_versions = TensorVersions(self._all_buffers())

    def _all_buffers(self) -> list[Tensor | None]:
        """Return the buffers of the master and then of each replica, each in the order of `_places`."""
        trees = [[module for module, _ in self._replicas[0].modules]]
        trees += [[own for _, own in replica.modules] for replica in self._replicas]
        return [buffer for tree in trees for module in tree for buffer in module._buffers.values()]

    def _send(self, tensors: Sequence[Tensor | None], receive: Callable[[Replica, Sequence[Any]], None]) -> None:
        """Concatenate tensors of the master once, and give them to every replica."""
        present = [tensor for tensor in tensors if tensor is not None]
        devices = list(dict.fromkeys(self._devices))
        for device, values in zip(devices, send_all(present, devices), strict=True):
            for replica in self._replicas:
                if replica.device == device:
                    remaining = iter(values)
                    receive(replica, [None if tensor is None else next(remaining) for tensor in tensors])

    def changed_buffers(self, active: Sequence[int]) -> list[AttributePlace]:
        """Return the places of buffers that the step may have changed on active replicas."""
        by_replica = [self._replicas[index].list_buffers() for index in active]
        if any(places != self._places for places in by_replica):
            self.discard()  # a step has registered or deleted buffers
            return [*dict.fromkeys(chain.from_iterable(by_replica))]
        if self.is_learning or not self._places:
            return self._places
        number = len(self._places)
        positions = self._buffer_versions.changed(self._all_buffers())
        changed = {position % number for position in positions if position // number - 1 in active}
        expected = self.changing if self._last_step == "training_step" else ()
        return [place for n, place in enumerate(self._places) if n in changed or place in expected]

    def keep_own(self, place: AttributePlace) -> None:
        """Let every replica keep its value of a buffer, such as a mask of its chunk, until the master's changes."""
        position, name = place
        self._own[place] = TensorVersions([self._replicas[0].modules[position][0]._buffers.get(name)])

    def discard(self) -> None:
        """Forget the replicas; the next refresh builds new ones."""
        self._modules = []

    def _build(self) -> None:
        for name, module in self.master.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise UnsupportedFeatureError(
                    f"module `{name}` is a TorchScript module, which cannot be replicated."
                    " Use the module that it was made of."
                )
        for name, parameter in self.master.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise UnsupportedFeatureError(
                    f"parameter `{name}` is not initialised yet, so it cannot be replicated."
                    " Run one forward pass of the lazy module in `configure_model`."
                )
        self._replicas = [Replica(self.master, self._devices[0], device) for device in self._devices]
        self._modules = list(self.master.modules())
        self._parts = _list_parts(self._modules)
        self._originals = [parameter for parameter, _ in self._replicas[0].parameters]
        self._places = self._replicas[0].list_buffers()
        self.changing = set()
        self._own = {}
        self._buffer_versions = TensorVersions(self._all_buffers())

    @contextmanager
    def refuse_changed_parameters(self, active: Sequence[int], step: str) -> Iterator[None]:
        """Refuse a step that changes values of parameters.

        Changes through `.data` have no version, and are found in the first training steps.
        """
        before = {index: versions_of(self._replicas[index].leaves) for index in active}
        values = self._fingerprint_parameters(active)
        yield
        for index, versions in before.items():
            now = versions_of(self._replicas[index].leaves)
            if now != versions:
                parameter = next(
                    one for one, old, new in zip(self._originals, versions, now, strict=True) if new != old
                )
                raise UnsupportedFeatureError(
                    f"parameter `{self._name(parameter)}` was changed in place inside `{step}`, which every replica"
                    " does again. Change it in a hook such as `on_train_batch_start`."
                )
        if values != self._fingerprint_parameters(active):
            raise UnsupportedFeatureError(
                f"a parameter was changed through `.data` inside `{step}`, which every replica does again. Change it in"
                " a hook such as `on_train_batch_start`, as a moving average of the weights."
            )

    def adopt_requires_grad(self, active: Sequence[int], step: str) -> None:
        """Freeze and thaw the master's parameters as the step has done on every active replica."""
        before = [*map(_REQUIRES_GRAD, self._originals)]
        flags = [[*map(_REQUIRES_GRAD, self._replicas[index].leaves)] for index in active]
        if all(one == before for one in flags):
            return
        for parameter, *own in zip(self._originals, *flags, strict=True):
            if len(set(own)) > 1:
                raise UnsupportedFeatureError(
                    f"`{step}` has frozen the parameter `{self._name(parameter)}` on some replicas only. Set"
                    " `requires_grad` in a hook such as `on_train_batch_start`."
                )
            parameter.requires_grad_(own[0])

    def _name(self, parameter: nn.Parameter) -> str:
        return next(name for name, other in self.master.named_parameters() if other is parameter)

    def _fingerprint_parameters(self, active: Sequence[int]) -> list[int]:
        """Return a number that depends on the values of the parameters of each replica, in the first training steps."""
        if not self.is_learning:
            return []
        return [
            fingerprint_all({str(position): leaf for position, leaf in enumerate(self._replicas[index].leaves)})
            for index in active
        ]

    def reduce_gradients(self, active: Sequence[int]) -> None:
        """Add up the gradients in the order of the replicas; hooks on the master's parameters see the sum, once."""
        totals: list[Tensor | None] = [None] * len(self._originals)
        for index in active:
            found = [leaf.grad for leaf in self._replicas[index].leaves]
            self._replicas[index].forget_gradients()
            (sent,) = send_all([gradient for gradient in found if gradient is not None], self._devices[:1])
            remaining = iter(sent)
            pairs: list[tuple[Tensor, Tensor]] = []
            for position in (n for n, gradient in enumerate(found) if gradient is not None):
                gradient, total = next(remaining), totals[position]
                if total is None:
                    totals[position] = gradient
                elif total.layout == gradient.layout == torch.strided:
                    pairs.append((total, gradient))
                else:
                    totals[position] = total + gradient
            if pairs:
                add_all_(*zip(*pairs, strict=True))
        hooked: list[tuple[nn.Parameter, Tensor]] = []
        for parameter, total in zip(self._originals, totals, strict=True):
            if total is None:
                continue
            if has_gradient_hooks(parameter):
                hooked.append((parameter, total))
            elif parameter.grad is not None:
                parameter.grad.add_(total)
            elif total.layout == torch.strided and total.stride() != parameter.stride():
                # Transfers lose strides such as `channels_last`, which fused optimizers demand.
                parameter.grad = torch.empty_like(parameter, dtype=total.dtype).copy_(total)
            else:
                parameter.grad = total
        if hooked:
            # A backward pass that starts at the leaves accumulates as usual and runs the hooks.
            torch.autograd.backward([parameter for parameter, _ in hooked], [gradient for _, gradient in hooked])


def _list_parts(modules: Sequence[nn.Module]) -> list[object]:
    """Return the names and objects that modules consist of; in few passes, because this runs in every step."""
    owned = [module._modules for module in modules] + [module._parameters for module in modules]
    names = chain.from_iterable(chain(owned, (module._buffers for module in modules)))
    return [*names, *chain.from_iterable(part.values() for part in owned)]

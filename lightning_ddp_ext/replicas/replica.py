"""Replicas of a module on several devices."""

import functools
import operator
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import STRUCTURE, add_all_, copy_all_, has_gradient_hooks
from lightning_ddp_ext.distributed.flat_tensors import send_all
from lightning_ddp_ext.errors import UnsupportedFeatureError

_MAX_DEPTH = 4
_MAX_LENGTH = 10_000


class References:
    """What each part of the user's module (the master) is called in one replica.

    Modules keep references to each other outside the module tree: in lists, hooks, bound methods, partial functions and
    closures. A shallow copy of a module would still reach the master through them, so they are rewritten. Everything
    that does not lead to a part of the master is shared: datasets, hyperparameters and the trainer are never copied.

    Args:
        home: Device of the master.
        device: Device of the replica.
    """

    def __init__(self, home: torch.device, device: torch.device) -> None:
        self._home = home
        self._device = device
        # The original is kept beside its counterpart, so that its id is not given to another object.
        self._counterparts: dict[int, tuple[Any, Any]] = {}

    def add(self, original: object, counterpart: object) -> None:
        """Record the replica's counterpart of a part of the master."""
        self._counterparts[id(original)] = (original, counterpart)

    def find(self, original: object) -> Any | None:
        """Return the replica's counterpart of a part of the master, or None if it has none."""
        entry = self._counterparts.get(id(original))
        return None if entry is None else entry[1]

    def rewrite(self, value: Any, depth: int = 0) -> Any:
        """Return `value` with every part of the master in it replaced.

        Containers are followed to a depth of 4; longer ones than 10,000 entries are taken for data and left alone.

        Args:
            value: An attribute of one of the master's modules.
            depth: How many containers the value is nested in.

        Returns:
            The value itself if nothing had to be replaced, otherwise a copy.
        """
        counterpart = self._counterparts.get(id(value))
        if counterpart is not None:
            return counterpart[1]
        if isinstance(value, torch.Tensor):
            moves = value.device == self._home and self._device != self._home
            return value.detach().to(self._device) if moves else value
        if depth == _MAX_DEPTH:
            return value
        return self._rewrite_compound(value, depth + 1)

    def _rewrite_compound(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is types.MethodType:
            owner = self.rewrite(value.__self__, depth)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if kind is types.FunctionType:
            return self._rewrite_closure(value, depth)
        if kind is functools.partial:
            parts = (value.func, value.args, value.keywords)
            function, args, keywords = (self.rewrite(part, depth) for part in parts)
            same = all(new is old for new, old in zip((function, args, keywords), parts, strict=True))
            return value if same else functools.partial(function, *args, **keywords)
        if kind in (list, tuple) and len(value) <= _MAX_LENGTH:
            items = [self.rewrite(item, depth) for item in value]
            return value if all(new is old for new, old in zip(items, value, strict=True)) else kind(items)
        if kind in (dict, OrderedDict) and len(value) <= _MAX_LENGTH:
            entries = {key: self.rewrite(item, depth) for key, item in value.items()}
            return value if all(entries[key] is value[key] for key in value) else kind(entries)
        return value

    def _rewrite_closure(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        cells = function.__closure__ or ()
        # An empty cell belongs to a variable that is assigned later; its ValueError has no other meaning.
        contents = [cell.cell_contents if _is_filled(cell) else None for cell in cells]
        rewritten = [self.rewrite(content, depth) for content in contents]
        if all(new is old for new, old in zip(rewritten, contents, strict=True)):
            return function
        closure = tuple(
            types.CellType(new) if _is_filled(cell) else cell for new, cell in zip(rewritten, cells, strict=True)
        )
        copy = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        copy.__dict__.update(function.__dict__)
        return copy


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


CopyModule = Callable[[nn.Module, torch.device], nn.Module | None]


class Replica:
    """One copy of the master's module tree.

    Each module of a replica has its own attribute dictionary, its own leaf parameters and its own buffers. On the
    master's device the parameters alias the master's storage, elsewhere they are copies.

    Args:
        master: The user's module.
        home: Device of the master.
        device: Device of this replica.
        copy_module: Returns an independent copy of a module (with everything below it) that must not be replicated by
            reference, or None for ordinary ones.
    """

    def __init__(self, master: nn.Module, home: torch.device, device: torch.device, copy_module: CopyModule) -> None:
        self.device = device
        self._home = home
        self.references = References(home, device)
        self.parameters: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.modules: list[tuple[nn.Module, nn.Module]] = []
        for original in master.modules():
            if self.references.find(original) is None:
                self._add_module(original, copy_module)
        for original, copy in self.modules:
            self._fill(original, copy)
        for original, copy in self.modules:
            for name, value in original.__dict__.items():
                if name not in STRUCTURE:
                    copy.__dict__[name] = self.references.rewrite(value)
        self.module: nn.Module = self.references.find(master)  # type: ignore[assignment]

    def _add_module(self, original: nn.Module, copy_module: CopyModule) -> None:
        independent = copy_module(original, self.device)
        if independent is not None:
            for part, copy in zip(original.modules(), independent.modules(), strict=True):
                self.references.add(part, copy)
            return
        copy = original.__new__(type(original))
        copy.__dict__ = dict(original.__dict__)
        self.references.add(original, copy)
        self.modules.append((original, copy))

    def _fill(self, original: nn.Module, copy: nn.Module) -> None:
        def counterpart(part: Any, make: Callable[[Any], Any]) -> Any:
            if part is None:
                return None
            found = self.references.find(part)
            return make(part) if found is None else found

        copy.__dict__["_modules"] = type(original._modules)(
            (name, counterpart(child, lambda child: child)) for name, child in original._modules.items()
        )
        copy.__dict__["_parameters"] = type(original._parameters)(
            (name, counterpart(parameter, self._add_parameter)) for name, parameter in original._parameters.items()
        )
        copy.__dict__["_buffers"] = type(original._buffers)(
            (name, counterpart(buffer, self._add_buffer)) for name, buffer in original._buffers.items()
        )

    def _add_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        data = parameter.detach()
        own = data if data.device == self.device else data.to(self.device)
        leaf = own.as_subclass(type(parameter))
        leaf.requires_grad_(parameter.requires_grad)
        leaf.__dict__.update(parameter.__dict__)
        self.references.add(parameter, leaf)
        self.parameters.append((parameter, leaf))
        return leaf

    def _add_buffer(self, buffer: Tensor) -> Tensor:
        own = buffer.detach().clone().to(self.device)
        self.references.add(buffer, own)
        return own

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The replica's own parameters."""
        return [leaf for _, leaf in self.parameters]

    def receive_parameters(self) -> None:
        """Take over the master's parameter values and `requires_grad` flags."""
        originals, leaves = [parameter for parameter, _ in self.parameters], self.leaves
        if [leaf.requires_grad for leaf in leaves] != [parameter.requires_grad for parameter in originals]:
            for parameter, leaf in self.parameters:
                leaf.requires_grad_(parameter.requires_grad)
        if self.device != self._home:
            self._copy_parameters()
        elif not all(map(Tensor.is_set_to, leaves, originals)):
            # `parameter.data = ...` (weight averaging, resizing) ends the aliasing.
            for parameter, leaf in self.parameters:
                leaf.data = parameter.detach()

    def _copy_parameters(self) -> None:
        for parameter, leaf in self.parameters:
            if parameter.shape != leaf.shape or parameter.dtype != leaf.dtype:
                leaf.data = torch.empty_like(parameter, device=self.device)
        sent = send_all([parameter.detach() for parameter, _ in self.parameters], self.device)
        copy_all_([leaf.detach() for leaf in self.leaves], sent)

    def receive_buffers(self) -> None:
        """Take over the master's buffers, whatever changed them.

        Version counters cannot tell which did: batch normalisation and `.data` do not advance them.
        """
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for original, copy in self.modules:
            if not original._buffers:
                continue
            own_buffers = copy._buffers
            for name, buffer in original._buffers.items():
                own = own_buffers.get(name)
                if buffer is None:
                    own_buffers[name] = None
                elif own is None or own.shape != buffer.shape or own.dtype != buffer.dtype or own.is_inference():
                    own_buffers[name] = buffer.detach().clone().to(self.device)
                else:
                    sources.append(buffer)
                    targets.append(own)
        if targets:
            copy_all_(targets, send_all(sources, self.device))


class Replicas(Sequence[Replica]):
    """The replicas of one module, kept between steps and rebuilt when the module tree changes.

    Args:
        master: The user's module, on the first device.
        devices: Device of each replica; the first is the master's. A device may be listed several times.
        copy_module: See `Replica`.
        on_build: Called with the new replicas after each (re)build.

    Raises:
        UnsupportedFeatureError: If a parameter has not been initialised yet.
    """

    def __init__(
        self,
        master: nn.Module,
        devices: Sequence[torch.device],
        copy_module: CopyModule = lambda module, device: None,
        on_build: Callable[["Replicas"], None] = lambda replicas: None,
    ) -> None:
        self.master = master
        self._devices = list(devices)
        self._copy_module = copy_module
        self._on_build = on_build
        self._replicas: list[Replica] = []
        self._modules: list[nn.Module] = []
        self._parts: list[object] = []

    def __len__(self) -> int:
        return len(self._devices)

    def __getitem__(self, index: Any) -> Any:
        return self._replicas[index]

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def refresh(self) -> None:
        """Bring every replica up to date with the master's structure, parameters and buffers."""
        # Without inference mode: buffers written here are used by autograd in the next training step.
        with torch.inference_mode(False), torch.no_grad():
            parts = _parts(self._modules)
            if not parts or len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
                self._build()
                return
            for replica in self._replicas:
                replica.receive_parameters()
                replica.receive_buffers()

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
        self._replicas = [Replica(self.master, self._devices[0], device, self._copy_module) for device in self._devices]
        self._modules = list(self.master.modules())
        self._parts = _parts(self._modules)
        self._on_build(self)

    def versions(self, active: Sequence[int]) -> dict[int, list[int]]:
        """Read the version counters of the replicas' parameters, which every change in place advances.

        Args:
            active: Indices of the replicas that are about to run.

        Returns:
            One counter per parameter, by replica.
        """
        return {index: [leaf._version for leaf in self._replicas[index].leaves] for index in active}

    def check_untouched(self, versions: dict[int, list[int]], step: str) -> None:
        """Refuse a step that has changed parameters; take over which of them it froze or thawed.

        Args:
            versions: What `versions` returned before the step.
            step: Name of the step.

        Raises:
            UnsupportedFeatureError: If a replica has changed a parameter in place. Writes to `.data` go unnoticed.
        """
        for index, before in versions.items():
            parameters = self._replicas[index].parameters
            for (parameter, leaf), version in zip(parameters, before, strict=True):
                if leaf._version != version:
                    raise UnsupportedFeatureError(
                        f"parameter `{self._name_of(parameter)}` was changed in place inside `{step}`, which every"
                        " replica does again. Change it in a hook such as `on_train_batch_start`."
                    )
                if leaf.requires_grad != parameter.requires_grad:
                    parameter.requires_grad_(leaf.requires_grad)

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next(name for name, other in self.master.named_parameters() if other is parameter)

    def forget_gradients(self) -> None:
        """Clear what a step has left on the replicas' parameters by backward passes of its own.

        On one device, Lightning clears gradients between the step and the backward pass.
        """
        for replica in self._replicas:
            for leaf in replica.leaves:
                leaf.grad = None

    def reduce_gradients(self, active: Sequence[int]) -> None:
        """Add the gradients of the replicas to the master's, in the order of the replicas, and clear them.

        Hooks on the master's parameters see the gradient of the whole batch, once.

        Args:
            active: Indices of the replicas that ran a backward pass.
        """
        totals: dict[int, Tensor] = {}  # by position of the parameter
        for index in active:
            leaves = self._replicas[index].leaves
            present = {position: grad for position, leaf in enumerate(leaves) if (grad := leaf.grad) is not None}
            for position in present:
                leaves[position].grad = None
            gradients = dict(zip(present, send_all(list(present.values()), self._devices[0]), strict=True))
            shared = gradients.keys() & totals.keys()
            dense = [p for p in shared if totals[p].layout == gradients[p].layout == torch.strided]
            if dense:
                add_all_([totals[position] for position in dense], [gradients[position] for position in dense])
            for position in shared.difference(dense):
                totals[position] = totals[position] + gradients[position]
            totals.update((position, gradients[position]) for position in gradients.keys() - shared)
        parameters = [parameter for parameter, _ in self._replicas[0].parameters]
        _accumulate([(parameters[position], totals[position]) for position in sorted(totals)])


def _parts(modules: Sequence[nn.Module]) -> list[object]:
    """Names and objects that modules consist of."""
    parts: list[object] = []
    for module in modules:
        parts += module._modules
        parts += module._modules.values()
        parts += module._parameters
        parts += module._parameters.values()
        parts += module._buffers
    return parts


def _accumulate(gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    hooked: list[tuple[nn.Parameter, Tensor]] = []
    for parameter, gradient in gradients:
        if has_gradient_hooks(parameter):
            hooked.append((parameter, gradient))
        elif parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad = parameter.grad.add_(gradient)
    if hooked:
        # A backward pass that starts at the leaves accumulates as usual and runs the hooks.
        torch.autograd.backward([parameter for parameter, _ in hooked], [gradient for _, gradient in hooked])

"""Replicas of a module, one per device, and what travels between them and the master."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import add_all_, has_gradient_hooks
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.parallel.messages.flat_messages import send_all
from lightning_ddp_ext.parallel.replicas.replica import CopyModule, Replica


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

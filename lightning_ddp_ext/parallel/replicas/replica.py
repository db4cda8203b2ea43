"""One copy of a module tree, with leaf parameters and buffers of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import STRUCTURE, copy_all_
from lightning_ddp_ext.parallel.messages.flat_messages import send_all
from lightning_ddp_ext.parallel.replicas.references import References

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

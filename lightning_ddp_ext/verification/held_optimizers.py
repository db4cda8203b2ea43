"""Optimizers of a step under manual optimization that keep the gradients they are given, and change no parameter."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_ext._lightning import LightningModule


class HeldOptimizer:
    """Stands in for an optimizer, so that all backward passes of a step see the same parameters."""

    def __init__(
        self, module: LightningModule, groups: Sequence[dict[str, Any]], steps: list[tuple[str, Tensor]]
    ) -> None:
        self.param_groups, self.state = groups, {}  # type: ignore[var-annotated]
        self.optimizer = self
        self._module, self._steps = module, steps
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Keep the gradients."""
        result = None if closure is None else closure()
        for group in self.param_groups:
            self._steps += [(self._names[id(one)], flat_gradient(one)) for one in group["params"]]
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only parameters of this optimizer have gradients."""
        self._module.toggle_optimizer(self)  # type: ignore[arg-type]
        yield
        self._module.untoggle_optimizer(self)  # type: ignore[arg-type]


class _Nothing:
    """Stands in for a scheduler: any method does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def hold_optimizers(module: Any, names: Mapping[int, str], optimizers: Sequence[Optimizer]) -> list[tuple[str, Tensor]]:
    """Give a copy of a module stand-ins for optimizers of the original, whose parameters have `names` by their `id`.

    Returns a list to which each step adds the gradients of its parameters.
    """
    steps: list[tuple[str, Tensor]] = []
    parameters = dict(module.named_parameters())
    held = [
        HeldOptimizer(
            module,
            [
                {**group, "params": [parameters[names[id(one)]] for one in group["params"]]}
                for group in one.param_groups
            ],
            steps,
        )
        for one in optimizers
    ]
    schedulers = module.lr_schedulers()
    count = len(schedulers) if isinstance(schedulers, list) else int(schedulers is not None)
    standing = [_Nothing() for _ in range(count)]
    module.trainer.optimizers = held
    module.optimizers = lambda use_pl_optimizer=True: held[0] if len(held) == 1 else held
    module.lr_schedulers = lambda: (standing[0] if count == 1 else standing) if count else None
    return steps


def flat_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter as a vector in float64; zeros if it has none."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    dense = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1).cpu().double()

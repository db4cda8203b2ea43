"""Checks of the steps of optimizers on one rank: synchronised gradients, and losses of closures that ranks share."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_ddp_ext.distributed.exchange import add_up
from lightning_ddp_ext.errors import UnsynchronizedGradientsError
from lightning_ddp_ext.ranks.sample_counts import sums_and_means
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer


class StepGuard:
    """Checks the gradients before each optimizer step of this process, also of optimizers unknown to Lightning.

    A closure, which may contain the backward pass, runs before the check. The optimizer gets the loss of the whole
    batch from it, so that steps that depend on the loss, such as those of L-BFGS, are the same on all ranks. Optimizers
    of other parameters are not checked.

    Args:
        rank: The rank, for errors.
        reducer: The reducer of the gradients.
        named_parameters: Returns the parameters at the moment, with the names that errors use.
        is_known: Returns True for an optimizer that was set up with Lightning.
        weigh_loss: Returns the weight of the current batch, and whether its loss is a sum.
        synchronize_by: What to do about gradients that are not synchronised, for the error.
        create_in: Where to create parameters, for the error.

    Attributes:
        steps: Number of optimizer steps that have begun, the same on ranks that are in step.
    """

    def __init__(
        self,
        rank: int,
        reducer: GradientReducer,
        named_parameters: Callable[[], Iterable[tuple[str, Tensor]]],
        is_known: Callable[[Optimizer], bool],
        weigh_loss: Callable[[], tuple[float, bool]],
        synchronize_by: str,
        create_in: str,
    ) -> None:
        self._rank = rank
        self._reducer = reducer
        self._named_parameters = named_parameters
        self._is_known = is_known
        self._weigh_loss = weigh_loss
        self._synchronize_by = synchronize_by
        self._create_in = create_in
        self.steps = 0
        before_step = weakref.WeakMethod(self._before_step)  # the hook must not keep the module alive

        def hook(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
            own = before_step()
            return None if own is None else own(optimizer, args, kwargs)

        self.close = weakref.finalize(self, register_optimizer_step_pre_hook(hook).remove)

    def check(self, optimizer: Optimizer) -> None:
        """Raise `UnsynchronizedGradientsError` if the optimizer would step with gradients of this rank alone."""
        parameters = _parameters(optimizer)
        about = f"rank {self._rank}: `{type(optimizer).__name__}` is about to step with"
        if self._reducer.has_unsynchronized(parameters):
            raise UnsynchronizedGradientsError(
                f"{about} gradients that have not been synchronised with the other ranks. {self._synchronize_by}"
            )
        unmanaged = self._reducer.unmanaged_parameters(parameters)
        if len(unmanaged) == len(parameters) and not self._is_known(optimizer):
            return
        for parameter in unmanaged:
            if parameter.requires_grad and parameter.grad is not None:
                raise UnsynchronizedGradientsError(
                    f"{about} the gradient of {self._name(parameter)}, which was not part of the module when training"
                    f" was set up, so that no other rank knows of it. Create it as an `nn.Parameter` {self._create_in}."
                )

    def _name(self, parameter: Tensor) -> str:
        name = next((name for name, own in self._named_parameters() if own is parameter), None)
        return f"a parameter of shape {list(parameter.shape)}" if name is None else f"`{name}`"

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        self.steps += self._has_managed_parameters(optimizer)
        is_positional = len(args) > 1
        closure = args[1] if is_positional else kwargs.get("closure")
        if closure is None:
            self.check(optimizer)
            return None
        if isinstance(closure, _CheckedClosure) and closure.is_checked_by(self):
            return None  # a subclass calls `step` of its base class
        checked = _CheckedClosure(closure, optimizer, self)
        if is_positional:
            return (args[0], checked, *args[2:]), kwargs
        return args, {**kwargs, "closure": checked}

    def end_closure(self, optimizer: Optimizer, loss: Any) -> Any:
        """Check the gradients after a closure; return its loss, of the whole batch if the step may depend on it."""
        self.check(optimizer)
        return loss if loss is None or not self._shares_loss(optimizer) else self._of_all_ranks(loss, optimizer)

    def _shares_loss(self, optimizer: Optimizer) -> bool:
        """Return True if the step may depend on the loss. Of torch's optimizers, only that of L-BFGS does."""
        if type(optimizer).step.__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS):
            return False
        return self._has_managed_parameters(optimizer)

    def _has_managed_parameters(self, optimizer: Optimizer) -> bool:
        parameters = _parameters(optimizer)
        return len(self._reducer.unmanaged_parameters(parameters)) < len(parameters)

    def _of_all_ranks(self, loss: Any, optimizer: Optimizer) -> Tensor:
        """Return the loss of the whole batch, in the widest type: a rank without data may not know the type."""
        weight, is_sum = self._weigh_loss()
        value = torch.as_tensor(loss, device=_parameters(optimizer)[0].device).detach().reshape(1)
        # The loss of a shadow step has weight 0, and is left out of sums. In an uneven step of the Trainer, collectives
        # are redirected to the ranks that run the step.
        sums, means = sums_and_means(value, None if is_sum and not weight else weight, add_up)
        return (sums if is_sum else means)[0]


@dataclass(frozen=True, slots=True)
class _CheckedClosure:
    """A closure that a guard checks."""

    closure: Callable[[], Any]
    optimizer: Optimizer
    guard: StepGuard

    def __call__(self) -> Any:
        return self.guard.end_closure(self.optimizer, self.closure())

    def is_checked_by(self, guard: StepGuard) -> bool:
        """Return True if this guard checks the closure too, as one of several guards."""
        inner = self.closure
        return self.guard is guard or (isinstance(inner, _CheckedClosure) and inner.is_checked_by(guard))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

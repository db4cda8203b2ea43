"""Optimizer steps with gradients that are this rank's own are refused."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_ddp_ext.errors import UnsynchronizedGradientsError
from lightning_ddp_ext.parallel.gradients.reducer import GradientReducer


class StepGuard:
    """Watches the optimizers of this process, those that Lightning does not know as well.

    A step with a closure is looked at when the closure has run: it may hold the backward pass. Optimizers that have
    nothing to do with the training, such as one of a callback with parameters of its own, may do what they like.

    Args:
        trainer: The Trainer, while it fits.
        module: Its module.
        reducer: Synchronises the gradients of the module.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, reducer: GradientReducer) -> None:
        self._trainer = trainer
        self._module = module
        self._reducer = reducer
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse gradients that have not been synchronised, those of parameters that cannot be among them.

        Raises:
            UnsynchronizedGradientsError: If the optimizer is about to step with such gradients.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        about = f"rank {self._trainer.global_rank}: `{type(optimizer).__name__}` is about to step with"
        if self._reducer.unsynchronized(parameters):
            raise UnsynchronizedGradientsError(
                f"{about} gradients that have not been synchronised with the other ranks. Call"
                " `self.manual_backward(loss)` instead of `loss.backward()`, and leave the last one before a step out"
                " of `toggle_model(sync_grad=False)`."
            )
        strangers = self._reducer.strangers(parameters)
        if not strangers or (len(strangers) == len(parameters) and optimizer not in self._trainer.optimizers):
            return
        for parameter in strangers:
            if parameter.requires_grad and parameter.grad is not None:
                raise UnsynchronizedGradientsError(
                    f"{about} the gradient of {self._name(parameter)}, which was not part of the module when training"
                    " was set up, so that no other rank knows of it. Create it in `__init__`, `configure_model` or"
                    " `setup` of the module."
                )

    def close(self) -> None:
        """Stop watching."""
        self._hook.remove()

    def _name(self, parameter: Tensor) -> str:
        names = (name for name, own in self._module.named_parameters() if own is parameter)
        name = next(names, None)
        return f"a parameter of shape {list(parameter.shape)}" if name is None else f"`{name}`"

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        given = len(args) > 1
        closure = args[1] if given else kwargs.get("closure")
        if closure is None:
            self.check(optimizer)
            return None
        checked = self._checked(closure, optimizer)
        return ((args[0], checked, *args[2:]), kwargs) if given else (args, {**kwargs, "closure": checked})

    def _checked(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        def run() -> Any:
            loss = closure()
            self.check(optimizer)
            return loss

        return run

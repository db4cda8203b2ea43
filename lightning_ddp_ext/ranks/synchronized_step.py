"""The training step of one rank: weighted micro-batches and synchronised backward passes."""

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_ddp_ext._compat.lightning import takes_dataloader_iter
from lightning_ddp_ext._compat.lightning_loops import leaves_out_backward
from lightning_ddp_ext._devices import widest_float
from lightning_ddp_ext.batches.weights import GradientWeights, SkipWarning, WeightBy
from lightning_ddp_ext.distributed.exchange import gather_integer
from lightning_ddp_ext.errors import UnsupportedFeatureError, UnsynchronizedGradientsError
from lightning_ddp_ext.ranks.sample_counts import BatchSamples
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer


class StepGuard:
    """Checks the gradients before each optimizer step of this process, of optimizers unknown to Lightning too.

    With a closure, the check follows the closure, which may contain the backward pass. An optimizer that has nothing to
    do with the training, such as one of a callback for separate parameters, is not checked.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, reducer: GradientReducer) -> None:
        self._trainer = trainer
        self._module = module
        self._reducer = reducer
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def check(self, optimizer: Optimizer) -> None:
        """Raise `UnsynchronizedGradientsError` if the optimizer would step with gradients of this rank alone."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        about = f"rank {self._trainer.global_rank}: `{type(optimizer).__name__}` is about to step with"
        if self._reducer.unsynchronized(parameters):
            raise UnsynchronizedGradientsError(
                f"{about} gradients that have not been synchronised with the other ranks. Call"
                " `self.manual_backward(loss)` instead of `loss.backward()`, and leave the last one before a step out"
                " of `toggle_model(sync_grad=False)`."
            )
        unmanaged = self._reducer.unmanaged_parameters(parameters)
        if not unmanaged or (len(unmanaged) == len(parameters) and optimizer not in self._trainer.optimizers):
            return
        for parameter in unmanaged:
            if parameter.requires_grad and parameter.grad is not None:
                raise UnsynchronizedGradientsError(
                    f"{about} the gradient of {self._name(parameter)}, which was not part of the module when training"
                    " was set up, so that no other rank knows of it. Create it in `__init__`, `configure_model` or"
                    " `setup` of the module."
                )

    def close(self) -> None:
        """Stop checking."""
        self._hook.remove()

    def _name(self, parameter: Tensor) -> str:
        names = (name for name, own in self._module.named_parameters() if own is parameter)
        name = next(names, None)
        return f"a parameter of shape {list(parameter.shape)}" if name is None else f"`{name}`"

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        is_positional = len(args) > 1
        closure = args[1] if is_positional else kwargs.get("closure")
        if closure is None:
            self.check(optimizer)
            return None

        def run_and_check() -> Any:
            loss = closure()
            self.check(optimizer)
            return loss

        if is_positional:
            return (args[0], run_and_check, *args[2:]), kwargs
        return args, {**kwargs, "closure": run_and_check}


_PASSES = 1000  # more than there are synchronised backward passes in a batch


class SynchronizedStep:
    """Weighs the gradient of this rank, and synchronises it at the right time.

    `active` are the ranks that have a batch in this step; `has_equal_weights` is True once all batches weigh the same
    because a rank could not count its samples.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        reducer: GradientReducer,
        weight_by: WeightBy,
        samples: BatchSamples,
        has_equal_weights: bool = False,
    ) -> None:
        self.reducer = reducer
        self.active: Sequence[int] = range(trainer.world_size)
        self.has_equal_weights = has_equal_weights
        self.is_blocked = False  # synchronisation is postponed, as in an accumulation window
        self._trainer = trainer
        self._module = module
        self._weights = GradientWeights(weight_by)
        self._samples = samples
        self._is_by_samples = weight_by == "samples" and not takes_dataloader_iter(module, "training_step")
        self._counted: set[int] = set()  # ranks that have counted the samples of a batch
        self._last_samples = 1.0
        self._has_warned = False
        self._guard = StepGuard(trainer, module, reducer)
        self._skip_warning = SkipWarning()
        self._synchronized = False
        self._last_weight = 0.0
        self._passes = 0  # synchronised backward passes of this batch
        if self._is_by_samples and has_equal_weights:
            rank_zero_warn(
                "The checkpoint was saved by a run in which all batches had the same weight, since a rank could not"
                " count its samples. This run continues with equal weights. Pass a callable `weight_by`, which returns"
                " the weight of a batch, to change that."
            )

    def begin(self, batch: Any) -> None:
        """Weigh a micro-batch before `training_step` is called with it."""
        self._begin()
        self._weights.set_batch(batch, self._count(batch) if self._is_by_samples else 1.0)
        if leaves_out_backward(self._trainer):
            self._weights.add_batch()

    def begin_without_data(self) -> None:
        """Begin a step in which other ranks have a micro-batch and this rank has none."""
        self._begin()
        if self._is_by_samples:
            self._agree(is_counted=True)
        self._weights.set_no_batch()

    def skip(self) -> Tensor:
        """Give the micro-batch no weight, because `training_step` has returned None; return a loss of zero instead.

        Lightning rejects None on several ranks, and would skip the backward pass, for which the other ranks wait.
        """
        self._weights.skip_batch()
        self._skip_warning.show(f"rank {self._trainer.global_rank}")
        dtype = cast(torch.dtype, self._module.dtype)
        return torch.zeros((), device=self._module.device, dtype=dtype, requires_grad=True)

    @property
    def batch_weight(self) -> float:
        """Weight of the values that the micro-batch logs."""
        return self._weights.batch_weight

    @property
    def gradient_weight(self) -> float:
        """Weight of the gradient of the micro-batch."""
        return self._weights.in_gradient

    def _count(self, batch: Any) -> float:
        """Return the number of samples of a batch, or 1 for all batches if ranks have agreed on that."""
        samples = self._samples.count(batch)
        if self._agree(samples is not None):
            return 1.0
        if samples is None:
            # Ranks would have to agree in every step. Batches of a loader hardly differ in size.
            self._warn(f"This one weighs {self._last_samples:g} samples, as the one before it.")
            return self._last_samples
        self._last_samples = samples
        return samples

    def _agree(self, is_counted: bool) -> bool:
        """Return True if all batches weigh the same: a rank could not count the samples of its first batch.

        All ranks agree in each step in which a rank has its first batch, which may be long after the first step.
        """
        if not self.has_equal_weights and not self._counted.issuperset(self.active):
            counted = gather_integer(is_counted, self.reducer.process_group)
            self._counted.update(self.active)
            self.has_equal_weights = not all(counted)
            if self.has_equal_weights and counted.index(0) == self._trainer.global_rank:
                self._warn("All batches weigh the same.")
        return self.has_equal_weights

    def _warn(self, consequence: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"rank {self._trainer.global_rank}: the samples of a batch cannot be counted: {self._samples.problem}"
                f" {consequence} Pass a callable `weight_by`, which returns the weight of a batch, such as `len` for a"
                " list of samples; or `batch_dim`, if samples are in another dimension of all tensors; or"
                ' `weight_by="equal"`, if batches are equally large on all ranks.',
                category=UserWarning,
                stacklevel=2,
            )

    def _begin(self) -> None:
        index = self._trainer.fit_loop.epoch_loop.batch_idx
        if self._module.automatic_optimization and index % self._trainer.accumulate_grad_batches == 0:
            self._weights.restart()  # Lightning drops the gradients of an unfinished window here
        self._passes = 0

    def weigh(self, loss: Tensor) -> Tensor | None:
        """Return the loss of the micro-batch, weighted relative to earlier ones; None if it has no weight."""
        self.reducer.defer_hooks()  # also if this backward pass is not synchronised, for hooks that the step has added
        factor = self._weights.add_batch()
        if not factor:
            return None
        if not self._module.automatic_optimization:
            # Gradients may hold the sum over ranks of an earlier pass. It is averaged again, so it must stay unchanged.
            factor = float(len(self.active)) if self._weights.is_sum else 1.0
        return loss if factor == 1.0 else loss * factor

    @contextmanager
    def synchronize(self) -> Generator[None, None, None]:
        """Synchronise the gradients of the backward pass in the block, unless that is postponed."""
        if self.is_blocked:
            yield
            return
        weight, scale = self._weights.pop()
        control = self.reducer.control
        if self._module.automatic_optimization:
            control.scale = scale * self._trainer.accumulate_grad_batches  # Lightning has divided the loss by it
            control.divisor = 1.0 if self._weights.is_sum else None
        else:
            weight = min(weight, 1.0) if self._weights.is_sum else weight
            control.scale, control.divisor = None, None  # the user has averaged the accumulated losses
        control.position = _PASSES * self._trainer.fit_loop.epoch_loop.total_batch_idx + self._passes
        self._passes += 1
        with self.reducer.synchronize(weight):
            yield
        self._synchronized = True
        self._last_weight = weight

    @contextmanager
    def discard(self) -> Generator[None, None, None]:
        """Discard the gradients of a micro-batch without weight: its loss may be a mean over nothing, thus nan.

        The backward pass has to run nevertheless, since it may communicate.
        """
        kept = [(parameter, parameter.grad) for parameter in self._module.parameters()]
        for parameter, _ in kept:
            parameter.grad = None
        with self.reducer.disregard():
            yield
        for parameter, gradient in kept:
            parameter.grad = gradient

    @contextmanager
    def block(self) -> Generator[None, None, None]:
        """Postpone synchronisation in a block."""
        blocked, self.is_blocked = self.is_blocked, True
        try:
            yield
        finally:
            self.is_blocked = blocked

    def run_closure(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        """Run an optimizer's closure, and ensure that gradients and buffers are synchronised; return the loss.

        For L-BFGS, the loss is the mean over the ranks, since it determines the number of evaluations and the step
        size. It is None if a gradient scaler would find no gradient because no batch has weight: Lightning's precision
        plugins then skip the step.
        """
        self._synchronized = False
        loss = closure()
        if self._module.automatic_optimization and not self._synchronized:
            # Lightning skips the backward pass when it updates statistics for averaged weights.
            with self.synchronize():
                pass
        self._guard.check(optimizer)  # the hook of the guard misses optimizers that are not torch's
        if loss is None or self._leaves_scaler_nothing(optimizer):
            return None
        return self._mean(loss) if isinstance(optimizer, LBFGS) else loss

    def _leaves_scaler_nothing(self, optimizer: Optimizer) -> bool:
        precision, exchanged = self._trainer.precision_plugin, self.reducer.control.exchanged
        has_scaler = isinstance(precision, MixedPrecision) and precision.scaler is not None
        if not has_scaler or exchanged is None or exchanged.total_weight or not self._module.automatic_optimization:
            return False
        return all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"])

    def _mean(self, loss: Tensor) -> Tensor:
        """Return the weighted mean of the last loss over the ranks."""
        weight = torch.full((), self._last_weight, dtype=widest_float(loss.device), device=loss.device)
        weighted = loss.detach() * weight if self._last_weight else torch.zeros_like(weight)
        total = self._trainer.strategy.reduce(torch.stack([weighted, weight]), reduce_op="sum")
        # In the same type on every rank: a rank that skips its batch may not know the type of the others' loss.
        return total[0] / total[1]

    def close(self) -> None:
        """Remove the hooks from the module and from optimizers."""
        self._guard.close()
        self.reducer.close()


def check_weighable(module: LightningModule, weight_by: WeightBy) -> None:
    """Refuse a callable `weight_by` if the training step fetches its batches itself."""
    if callable(weight_by) and takes_dataloader_iter(module, "training_step"):
        raise UnsupportedFeatureError(
            "`training_step(self, dataloader_iter)` fetches batches itself, so that a callable `weight_by` has none"
            " to weigh. Take the batch instead, or leave `weight_by` out: each batch then has weight 1."
        )

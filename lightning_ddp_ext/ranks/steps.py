"""The training step of one rank under Lightning: its weight, the synchronisation of its gradient, its logged means."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import is_hook_of_loop, takes_dataloader_iter
from lightning_ddp_ext._compat.lightning_loaders import active_combined_loader
from lightning_ddp_ext._compat.lightning_logging import watch_logging
from lightning_ddp_ext._compat.lightning_loops import leaves_out_backward
from lightning_ddp_ext._devices import widest_float
from lightning_ddp_ext.batches.weights import WeightRule
from lightning_ddp_ext.distributed.exchange import gather_integer
from lightning_ddp_ext.errors import UnsynchronizedGradientsError
from lightning_ddp_ext.ranks.sample_counts import (
    BatchSamples,
    CountedCombinedLoader,
    FetchedBatch,
    StepParticipation,
    sums_and_means,
)
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer

_PASSES = 1000  # more than there are synchronised backward passes in a batch


class RankSteps(ABC):
    """The steps of one rank; the hooks of `ExplicitDDPStrategy` call it. torch's `JoinHook` is the model.

    Each batch of a loop begins with `begin_batch` and ends with `end_batch`, after its last hook. In between come
    `training_step` and `backward` in training, or `evaluation_step`. Implementations say how to run a step of the
    LightningModule and how to reduce a value.
    """

    def __init__(self, trainer: Trainer, samples: BatchSamples, gradient: "RankGradient | None") -> None:
        self.trainer = trainer
        self.module = trainer.lightning_module
        self.samples = samples
        self.all_ranks = StepParticipation(tuple(range(trainer.world_size)), is_shadow=False, is_uneven=False)
        self.participation = self.all_ranks  # in the current batch, and of all ranks outside of batches
        self.fit_gradient = gradient  # None unless the Trainer is fitting
        self.cleanup = ExitStack()  # restores Lightning at the end of the run

    @property
    def gradient(self) -> "RankGradient":
        """The gradient of this rank, while the Trainer is fitting."""
        assert self.fit_gradient is not None
        return self.fit_gradient

    def begin_batch(self, batch: Any) -> None:
        """Begin with a batch, before it is moved to the device, if a loop rather than the user moves it."""
        if not is_hook_of_loop(self.module, "batch_to_device"):
            return
        combined = active_combined_loader(self.trainer)
        if isinstance(combined, CountedCombinedLoader):
            self.begin_fetched(batch, combined.fetched.popleft())
        else:
            self.samples.end()

    def begin_fetched(self, batch: Any, fetched: FetchedBatch) -> None:
        """Begin with a batch of a loop."""
        self.participation = fetched.participation or self.all_ranks
        self.samples.begin(fetched.samples)

    def training_step(self, batch: Any, run: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        """Return the output of `training_step`, which `run` calls."""
        self.gradient.begin(batch, self.participation.active)
        output = self.run_step(run, self.gradient.log_weight)
        return self.gradient.skip() if output is None and self.module.automatic_optimization else output

    def evaluation_step(self, batch: Any, run: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        """Return the output of `validation_step` or `test_step`, which `run` calls."""
        return self.run_step(run, self.samples.weight(batch))

    def backward(self, run: Callable[[], None]) -> None:
        """Run a backward pass, and synchronise its gradients unless that is postponed."""
        with self.gradient.synchronize():
            run()

    def end_batch(self) -> None:
        """End the batch; hooks and logged values that follow belong to no batch."""
        self.samples.end()
        self.participation = self.all_ranks

    @abstractmethod
    def run_step(self, run: Callable[[], STEP_OUTPUT], weight: float) -> STEP_OUTPUT:
        """Run a step of the LightningModule, whose logged values have a weight."""

    @abstractmethod
    def reduce(
        self, tensor: Tensor, group: Any, reduce_op: Any, reduce: Callable[[Tensor, Any, Any], Tensor]
    ) -> Tensor:
        """Reduce a value over ranks, such as a logged one; `reduce` is Lightning's implementation."""

    def close(self) -> None:
        """End the run."""
        self.cleanup.close()


# The reductions of logged values; a mean is made of sums.
_OPERATIONS: dict[Any, Any] = {
    "mean": None, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN
}  # fmt: skip


class EvenSteps(RankSteps):
    """Steps in which every rank has a batch. The mean over ranks of a logged value has the weights of the batches."""

    def __init__(self, trainer: Trainer, samples: BatchSamples, gradient: "RankGradient | None") -> None:
        super().__init__(trainer, samples, gradient)
        self._weight: float | None = None  # of the values that a step of the LightningModule logs
        self._is_logging = False
        watch_logging(self.cleanup, self.trainer, self._log, self.samples.rounded, self.end_batch)

    @override
    def run_step(self, run: Callable[[], STEP_OUTPUT], weight: float) -> STEP_OUTPUT:
        self._weight = weight
        try:
            return run()
        finally:
            self._weight = None

    @override
    def reduce(
        self, tensor: Tensor, group: Any, reduce_op: Any, reduce: Callable[[Tensor, Any, Any], Tensor]
    ) -> Tensor:
        if reduce_op not in _OPERATIONS or self._weight is None or not self._is_logging:
            return reduce(tensor, group, reduce_op)

        # Lightning's function begins with a barrier, for which the host would wait.
        def all_reduce(values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
            dist.all_reduce(values, operation, group=group)
            return values

        values = tensor.detach().to(self.module.device, non_blocking=True)
        if reduce_op == "mean":
            _, means = sums_and_means(values.reshape(-1), self._weight, all_reduce)
            return means.reshape(tensor.shape).to(tensor)
        return all_reduce(values, _OPERATIONS[reduce_op]).to(tensor)

    def _log(self, key: str, metric: Any, proceed: Callable[[], None]) -> None:
        self._is_logging = True
        try:
            proceed()
        finally:
            self._is_logging = False


class RankGradient:
    """Weighs the gradient of this rank, and synchronises it at the right time.

    The loss of a micro-batch is multiplied by its weight relative to the first one, which is 1 as long as weights are
    equal. The accumulated gradient times the first weight is then the weighted sum.
    """

    def __init__(
        self,
        trainer: Trainer,
        reducer: GradientReducer,
        rule: WeightRule,
        samples: BatchSamples,
        has_equal_weights: bool = False,
    ) -> None:
        self.reducer = reducer
        self.has_equal_weights = has_equal_weights  # of all batches, since a rank cannot count samples
        self.is_blocked = False  # synchronisation is postponed, as in an accumulation window
        self.log_weight = 0.0  # of the values that the micro-batch logs
        self.weight = 0.0  # of the micro-batch in the gradient
        self._trainer = trainer
        self._module: LightningModule = trainer.lightning_module
        self._rule = rule
        self._samples = samples
        self._is_by_samples = rule.is_by_samples and not takes_dataloader_iter(self._module, "training_step")
        self._active: Sequence[int] = ()  # the ranks that have a batch in this step
        self._counted: set[int] = set()  # ranks that have counted the samples of a batch
        self._last_samples = 1.0
        self._has_warned = False
        self._first = self._total = 0.0  # weights of the accumulated micro-batches
        self._is_added = True  # the micro-batch is one of them
        self._is_weightless = False  # the next backward pass is, until it is synchronised
        self._guard = StepGuard(trainer, reducer)
        self._synchronized = False
        self._last_weight = 0.0
        self._passes = 0  # synchronised backward passes of this batch
        if self._is_by_samples and has_equal_weights:
            rank_zero_warn(
                "The checkpoint was saved by a run in which all batches had the same weight, since a rank could not"
                " count its samples. This run continues with equal weights. Pass a callable `weight_by`, which returns"
                " the weight of a batch, to change that."
            )

    def begin(self, batch: Any, active: Sequence[int]) -> None:
        """Weigh a micro-batch before `training_step` is called with it; `active` ranks have a micro-batch."""
        self._begin(active)
        self.log_weight = self.weight = self._rule.weigh(batch, self._count(batch) if self._is_by_samples else 1.0)
        if leaves_out_backward(self._trainer):
            self._add()

    def begin_without_data(self, active: Sequence[int]) -> None:
        """Begin a step in which the active ranks have a micro-batch and this rank has none."""
        self._begin(active)
        if self._is_by_samples:
            self._agree(is_counted=True)
        self.log_weight = self.weight = 0.0

    def _begin(self, active: Sequence[int]) -> None:
        self._active = active
        index = self._trainer.fit_loop.epoch_loop.batch_idx
        if self._module.automatic_optimization and index % self._trainer.accumulate_grad_batches == 0:
            self._first = self._total = 0.0  # Lightning drops the gradients of an unfinished window here
        self._is_added = False
        self._passes = 0

    def _add(self) -> float:
        """Add the micro-batch, once until a synchronisation; return the factor of its loss."""
        if not self._is_added:
            self._is_added = True
            self._total += self.weight
            self._first = self._first or self.weight
        return self.weight / self._first if self._first else 0.0

    def skip(self) -> Tensor:
        """Give the gradient no weight, because `training_step` has returned None; return a loss of zero instead.

        Lightning rejects None on several ranks, and would skip the backward pass, for which the other ranks wait.
        """
        self.weight = 0.0
        self._rule.warn_of_skip(f"rank {self._trainer.global_rank}")
        return zero_loss(self._module)

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
        if not self.has_equal_weights and not self._counted.issuperset(self._active):
            counted = gather_integer(is_counted, self.reducer.process_group)
            self._counted.update(self._active)
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

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the loss of the micro-batch, weighted relative to earlier ones."""
        self.reducer.defer_hooks()  # also if this backward pass is not synchronised, for hooks that the step has added
        factor = self._add()
        self._is_weightless = not factor
        if not factor:
            return loss
        if not self._module.automatic_optimization:
            # Gradients may hold the sum over ranks of an earlier pass. It is averaged again, so it must stay unchanged.
            factor = float(len(self._active)) if self._rule.is_sum else 1.0
        return loss if factor == 1.0 else loss * factor

    @contextmanager
    def synchronize(self) -> Generator[None, None, None]:
        """Synchronise the gradients of the backward pass in the block, unless that is postponed.

        Gradients of a loss that `weigh` gave no weight are discarded first: the loss may be a mean over nothing, thus
        nan. The backward pass has to run nevertheless, since it may communicate.
        """
        if self._is_weightless:
            self._is_weightless = False
            kept = [(parameter, parameter.grad) for parameter in self._module.parameters()]
            for parameter, _ in kept:
                parameter.grad = None
            with self.reducer.disregard():
                yield
            for parameter, gradient in kept:
                parameter.grad = gradient
            with self.synchronize():
                pass
            return
        if self.is_blocked:
            yield
            return
        weight, scale = self._total, self._first
        self._first = self._total = 0.0
        self._is_added = False
        control, is_sum = self.reducer.control, self._rule.is_sum
        if self._module.automatic_optimization:
            control.scale = scale * self._trainer.accumulate_grad_batches  # Lightning has divided the loss by it
            control.divisor = 1.0 if is_sum else None
        else:
            weight = min(weight, 1.0) if is_sum else weight
            control.scale, control.divisor = None, None  # the user has averaged the accumulated losses
        control.position = _PASSES * self._trainer.fit_loop.epoch_loop.total_batch_idx + self._passes
        self._passes += 1
        with self.reducer.synchronize(weight):
            yield
        self._synchronized = True
        self._last_weight = weight

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

        For L-BFGS, the loss is the mean over the ranks, since it determines the step size. It is None if a gradient
        scaler would find no gradient because no batch has weight: Lightning's precision plugins then skip the step.
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


def zero_loss(module: LightningModule) -> Tensor:
    """Return a loss of zero, for a batch without weight."""
    dtype = cast(torch.dtype, module.dtype)
    return torch.zeros((), device=module.device, dtype=dtype, requires_grad=True)


class StepGuard:
    """Checks the gradients before each optimizer step of this process, of optimizers unknown to Lightning too.

    A closure, which may contain the backward pass, runs before the check. Optimizers of other parameters are not
    checked.
    """

    def __init__(self, trainer: Trainer, reducer: GradientReducer) -> None:
        self._trainer = trainer
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
        named = self._trainer.lightning_module.named_parameters()
        name = next((name for name, own in named if own is parameter), None)
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

"""The training step of one rank under Lightning: its weight, the synchronisation of its gradient, its logged means."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from traceback import walk_stack
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import is_hook_of_loop, takes_dataloader_iter
from lightning_ddp_ext._compat.lightning_loaders import active_combined_loader
from lightning_ddp_ext._compat.lightning_loops import leaves_out_backward, watch_logging
from lightning_ddp_ext._compat.torch import replaced_collectives
from lightning_ddp_ext.batches.weights import WeightRule
from lightning_ddp_ext.distributed.exchange import add_up, gather_integers
from lightning_ddp_ext.errors import UnsupportedFeatureError, WarnOnce
from lightning_ddp_ext.loaders.step_loader import FetchedBatch, StepLoader, StepParticipation
from lightning_ddp_ext.ranks.sample_counts import BatchSamples, sums_and_means
from lightning_ddp_ext.ranks.step_guard import StepGuard
from lightning_ddp_ext.reducer.control import compare_steps
from lightning_ddp_ext.reducer.gradient_reducer import AccumulationWindow, GradientReducer

_PASSES = 1000  # more than there are synchronised backward passes in a batch
_COMBINING = ("all", "reduce_scatter")  # beginnings of collectives that give a rank values of other ranks
_NO_LOSS = ("torchmetrics", "torch.nn.modules.batchnorm")  # modules whose collectives do not combine losses


class RankSteps(ABC):
    """The steps of one rank; the hooks of `ExplicitDDPStrategy` call it.

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
        if isinstance(combined, StepLoader):
            self.begin_fetched(batch, combined.fetched.popleft())
        else:
            self.samples.begin(None)

    def begin_fetched(self, batch: Any, fetched: FetchedBatch) -> None:
        """Begin with a batch of a loop."""
        self.participation = fetched.participation or self.all_ranks
        self.samples.begin(fetched.samples, batch)

    def training_step(self, batch: Any, run: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        """Return the output of `training_step`, which `run` calls."""
        self.gradient.begin(batch, self.participation.active)
        with self.gradient.watch_collectives():
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
        self.samples.begin(None)
        self.participation = self.all_ranks
        if self.fit_gradient is not None:
            self.fit_gradient.reducer.buffers.settle()  # all ranks end the batch, and all its hooks have run
            self.fit_gradient.warn_of_weights()

    def end_epoch(self) -> None:
        """Compare steps and settings of optimizers, before any hook sees the values of an epoch."""
        if self.fit_gradient is not None and self.trainer.training:
            guard, group = self.fit_gradient.guard, self.fit_gradient.reducer.process_group
            of_ranks = gather_integers(guard.numbers(reads_devices=True), group)
            compare_steps(group, of_ranks, self.fit_gradient.reducer.control)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the steps for a checkpoint."""
        return {}

    @abstractmethod
    def run_step(self, run: Callable[[], STEP_OUTPUT], weight: float) -> STEP_OUTPUT:
        """Run a step of the LightningModule, whose logged values have a weight."""

    @abstractmethod
    def reduce(
        self, tensor: Tensor, group: Any, reduce_op: Any, reduce: Callable[[Tensor, Any, Any], Tensor]
    ) -> Tensor:
        """Reduce a value over ranks, such as a logged one; `reduce` is Lightning's implementation."""


class EvenSteps(RankSteps):
    """Steps in which every rank has a batch. The mean over ranks of a logged value has the weights of the batches."""

    def __init__(
        self, cleanup: ExitStack, trainer: Trainer, samples: BatchSamples, gradient: "RankGradient | None"
    ) -> None:
        super().__init__(trainer, samples, gradient)
        self._weight: float | None = None  # of the values that a step of the LightningModule logs
        self._is_logging = False
        watch_logging(cleanup, self.trainer, self._log, self.samples.rounded, self.end_batch, self.end_epoch)

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
        if reduce_op not in ("mean", "sum", "max", "min") or self._weight is None or not self._is_logging:
            return reduce(tensor, group, reduce_op)
        # Lightning's function begins with a barrier, for which the host would wait.
        values = tensor.detach().to(self.module.device, non_blocking=True)
        if reduce_op == "mean":
            _, means = sums_and_means(values.reshape(-1), self._weight, partial(add_up, group=group))
            return means.reshape(tensor.shape).to(tensor)
        dist.all_reduce(values, getattr(dist.ReduceOp, reduce_op.upper()), group=group)
        return values.to(tensor)

    def _log(self, key: str, metric: Any, proceed: Callable[[], None]) -> None:
        self._is_logging = True
        try:
            proceed()
        finally:
            self._is_logging = False


class RankGradient:
    """Weighs the gradient of this rank, and synchronises it at the end of each accumulation window."""

    def __init__(self, trainer: Trainer, reducer: GradientReducer, rule: WeightRule, samples: BatchSamples) -> None:
        self.reducer = reducer
        reducer.control.describe_position = lambda position: "batch {}, backward pass {}".format(
            *divmod(position, _PASSES)
        )
        reducer.buffers.settles_itself = False
        self.window = AccumulationWindow()
        self.log_weight = 0.0  # of the values that the micro-batch logs
        self.weight = 0.0  # of the micro-batch in the gradient
        self._trainer = trainer
        self._module: LightningModule = trainer.lightning_module
        self._rule = rule
        self._samples = samples
        # A step that fetches batches itself gives each the weight 1.
        self._counts_samples = rule.is_by_samples and not takes_dataloader_iter(self._module, "training_step")
        self._active: Sequence[int] = ()  # the ranks that have a batch in this step
        self._is_added = False  # the micro-batch is in the window
        self.guard = StepGuard(
            trainer.global_rank,
            reducer,
            self._module.named_parameters,
            known=lambda: trainer.optimizers,
            # Not of `self`: in a cycle with it, the process group would outlive the run.
            weigh_loss=lambda: (cast(Any, trainer.strategy).batch_weight, rule.is_sum),
            synchronize_by="Call `self.manual_backward(loss)` instead of `loss.backward()`, and leave the last one"
            " before a step out of `toggle_model(sync_grad=False)`.",
            create_in="in `__init__`, `configure_model` or `setup` of the module",
        )
        self._batch = -1  # number of the batch in the run
        self._passes = 0  # synchronised backward passes of this batch
        self._watched_epoch: int | None = None
        self._communicates = False  # `training_step` has issued collectives that combine values of ranks
        self._warn = WarnOnce()

    def begin(self, batch: Any, active: Sequence[int]) -> None:
        """Weigh a micro-batch before `training_step` is called with it; `active` ranks have a micro-batch."""
        self.begin_without_data(active)
        samples = self._samples.count(batch) if self._counts_samples else 1.0
        if samples is None:
            raise ValueError(f"rank {self._trainer.global_rank}: {self._samples.describe_problem()}")
        self.log_weight = self.weight = self._rule.weigh(batch, samples)
        if leaves_out_backward(self._trainer):
            self._add()

    def watch_collectives(self) -> AbstractContextManager[None]:
        """Note collectives in the block, in the first step of an epoch only, because replacing them takes time."""
        epoch = self._trainer.current_epoch
        if self._watched_epoch == epoch or self._communicates or not self._rule.is_by_samples:
            return nullcontext()
        self._watched_epoch = epoch
        return replaced_collectives(self._note_collective, self._note_group, lambda: None, lambda name: None)

    def _note_collective(self, group: dist.ProcessGroup, name: str) -> None:
        if name.startswith(_COMBINING) and group is not self.reducer.process_group:
            callers = [(str(frame.f_globals.get("__name__")), frame.f_code.co_name) for frame, _ in walk_stack(None)]
            self._communicates |= not any(
                module.startswith(_NO_LOSS) or (function == "reduce" and module.startswith("lightning_ddp_ext"))
                for module, function in callers  # `reduce` serves logged values
            )

    def _note_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        self._note_collective(group, _COMBINING[0])
        return group

    def warn_of_weights(self) -> None:
        """Warn once if a step communicates, and the batches of ranks have different numbers of samples."""
        exchanged = self.reducer.control.exchanged
        if not self._communicates or exchanged is None or len(set(filter(None, exchanged.weights))) < 2:
            return
        if self._trainer.global_rank == exchanged.source:
            self._warn(
                "`training_step` communicates between ranks, whose batches have different numbers of samples. A loss"
                " that each rank computes from the features or statistics of all ranks, as in SimCLR, CLIP or Barlow"
                ' Twins, needs `weight_by="equal"`. Ignore this if the loss is a mean over the samples of one rank.'
            )

    def begin_without_data(self, active: Sequence[int]) -> None:
        """Begin a step in which the active ranks have a micro-batch and this rank has none."""
        self._active, self.log_weight, self.weight = active, 0.0, 0.0
        loop = self._trainer.fit_loop.epoch_loop
        index = loop.batch_idx
        if self._module.automatic_optimization and index % self._trainer.accumulate_grad_batches == 0:
            self.window.begin()
        self._is_added = False
        if self._batch != loop.total_batch_idx:  # not when an optimizer runs its closure again
            self._batch, self._passes = loop.total_batch_idx, 0

    def _add(self) -> None:
        """Add the micro-batch to the window, once until a synchronisation."""
        if not self._is_added or not self.window.length:
            self._is_added = True
            self.window.add(self.weight)

    def skip(self) -> Tensor:
        """Give the gradient no weight, because `training_step` has returned None; return a loss of zero instead.

        Lightning rejects None on several ranks, and would skip the backward pass, for which the other ranks wait.
        """
        self.weight = 0.0
        self._rule.warn_of_skip(f"rank {self._trainer.global_rank}")
        return zero_loss(self._module)

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the loss of the micro-batch, weighted relative to earlier ones."""
        self._add()
        factor = self.window.weigh(self.weight)
        if factor and not self._module.automatic_optimization:
            # Gradients may hold the sum over ranks of an earlier pass. It is averaged again, so it must stay unchanged.
            factor = float(len(self._active)) if self._rule.is_sum else 1.0
        return loss if factor in (0.0, 1.0) else loss * factor

    def synchronize(self) -> AbstractContextManager[None]:
        """Synchronise the gradients of the backward pass in the block, unless that is postponed."""
        weight, is_sum = self.window.total, self._rule.is_sum
        scale, divisor = None, None  # under manual optimization, where the user has averaged the accumulated losses
        if self._module.automatic_optimization:
            self._refuse_second_pass()
            scale = self.window.first * self._trainer.accumulate_grad_batches  # Lightning has divided the loss by it
            divisor = 1.0 if is_sum else None
        elif is_sum:
            weight = min(weight, 1.0)
        self.guard.send_steps()
        position = _PASSES * self._trainer.fit_loop.epoch_loop.total_batch_idx + self._passes
        if not self.window.is_postponed:
            self._passes += 1
        return self.window.synchronize(self.reducer, weight, scale, divisor, position)

    def _refuse_second_pass(self) -> None:
        """Raise an error if an optimizer calls its closure again and Lightning keeps the synchronised gradients."""
        batches, index = self._trainer.accumulate_grad_batches, self._trainer.fit_loop.epoch_loop.batch_idx
        if self._passes and index % batches and not self.window.is_postponed:
            raise UnsupportedFeatureError(
                f"rank {self._trainer.global_rank}: the optimizer calls its closure more than once in a step, of which"
                f" `accumulate_grad_batches={batches}` makes the last batch only. Use larger batches instead of"
                " `accumulate_grad_batches`, or manual optimization."
            )

    def run_closure(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        """Run an optimizer's closure, and ensure that gradients and buffers are synchronised; return the loss.

        The loss is None if a gradient scaler would find no gradient because no batch has weight: Lightning's precision
        plugins then skip the step.
        """
        exchanged = self.reducer.control.exchanged
        loss = closure()
        if self._module.automatic_optimization and self.reducer.control.exchanged is exchanged:
            # Lightning skips the backward pass when it updates statistics for averaged weights.
            with self.synchronize():
                pass
        self.guard.check(optimizer)  # the hook of the guard misses optimizers that are not torch's
        return None if self._leaves_scaler_nothing(optimizer) else loss

    def _leaves_scaler_nothing(self, optimizer: Optimizer) -> bool:
        precision, exchanged = self._trainer.precision_plugin, self.reducer.control.exchanged
        has_scaler = isinstance(precision, MixedPrecision) and precision.scaler is not None
        if not has_scaler or exchanged is None or exchanged.total_weight or not self._module.automatic_optimization:
            return False
        return all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"])

    def close(self) -> None:
        """Remove the hooks from the module and from optimizers."""
        self.guard.close()
        self.reducer.close()


def zero_loss(module: LightningModule) -> Tensor:
    """Return a loss of zero, for a batch without weight."""
    dtype = cast(torch.dtype, module.dtype)
    return torch.zeros((), device=module.device, dtype=dtype, requires_grad=True)

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
from lightning_ddp_ext._compat.loops import leaves_out_backward
from lightning_ddp_ext.batches.weights import GradientWeights, SkipWarning, WeightBy
from lightning_ddp_ext.distributed.exchange import gather_integer
from lightning_ddp_ext.errors import UnsupportedFeatureError, UnsynchronizedGradientsError
from lightning_ddp_ext.join.lockstep_loader import HasNextBatch
from lightning_ddp_ext.ranks.sample_counts import BatchSamples
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from lightning_ddp_ext.resume.resumable_run import ResumableRun


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
        unmanaged_parameters = self._reducer.unmanaged_parameters(parameters)
        if not unmanaged_parameters or (
            len(unmanaged_parameters) == len(parameters) and optimizer not in self._trainer.optimizers
        ):
            return
        for parameter in unmanaged_parameters:
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


_PASSES = 1000  # more than there are synchronised backward passes in a batch


class SynchronizedStep:
    """Knows what this rank's gradient counts, and synchronises it at the right time.

    Args:
        trainer: The Trainer, while it fits.
        module: Its module.
        reducer: Synchronises the gradients of the module.
        weight_by: What a batch counts.
        samples: Knows how many samples a batch has.
        run: Lets all ranks leave together, and saves whether their batches have equal weights.

    Attributes:
        active: The ranks that have a batch in this step.
        has_next_batch: What is carried by the gradients, if there is such a thing.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        reducer: GradientReducer,
        weight_by: WeightBy,
        samples: BatchSamples,
        run: ResumableRun,
    ) -> None:
        self.reducer = reducer
        self._trainer = trainer
        self._module = module
        self._weights = GradientWeights(weight_by)
        self._samples = samples
        self._is_by_samples = weight_by == "samples" and not takes_dataloader_iter(module, "training_step")
        self._run = run
        self._counted: set[int] = set()  # the ranks that have counted the samples of a batch
        self._last_samples = 1.0
        self._has_warned = False
        self._guard = StepGuard(trainer, module, reducer)
        self._skip_warning = SkipWarning()
        self._blocked = False
        self._synchronized = False
        self._last_weight = 0.0
        self._passes = 0  # synchronised backward passes of this batch
        self.active: Sequence[int] = range(trainer.world_size)
        self.has_next_batch: HasNextBatch | None = None
        if self._is_by_samples and run.has_equal_weights:
            rank_zero_warn(
                "The checkpoint was saved by a run in which all batches had the same weight, since a rank could not"
                " count its samples. This run continues with equal weights. Pass a callable `weight_by`, which returns"
                " the weight of a batch, to change that."
            )

    def begin(self, batch: Any) -> None:
        """Weigh a micro-batch.

        Args:
            batch: What `training_step` is about to be called with.
        """
        self._begin()
        self._weights.set_batch(batch, self._count(batch) if self._is_by_samples else 1.0)
        if leaves_out_backward(self._trainer):
            self._weights.add_batch()

    def begin_without_data(self) -> None:
        """Have no micro-batch, while other ranks have one."""
        self._begin()
        if self._is_by_samples:
            self._agree(is_counted=True)
        self._weights.set_no_batch()

    def skip(self) -> Tensor:
        """Give the micro-batch no weight, because `training_step` has returned None.

        Lightning refuses None on several ranks, and would leave the backward pass out, for which the others wait.

        Returns:
            A loss of zero that depends on no parameter, instead of None.
        """
        self._weights.skip_batch()
        self._skip_warning.show(f"rank {self._trainer.global_rank}")
        dtype = cast(torch.dtype, self._module.dtype)
        return torch.zeros((), device=self._module.device, dtype=dtype, requires_grad=True)

    @property
    def is_blocked(self) -> bool:
        """Whether synchronisation is put off."""
        return self._blocked

    @property
    def notes(self) -> Sequence[float] | None:
        """The `note` of each rank in the last synchronisation, if this backward pass was synchronised."""
        report = self.reducer.report
        return None if self._blocked or report is None else [note for note, _ in report.notes]

    @property
    def batch_weight(self) -> float:
        """What the values that the micro-batch logs count."""
        return self._weights.batch_weight

    @property
    def gradient_weight(self) -> float:
        """What the gradient of the micro-batch counts."""
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
        """Return True if all batches weigh the same: a rank could not count the samples of its first one.

        All ranks agree in each step in which a rank has its first batch, which may be long after the first step.
        """
        if not self._run.has_equal_weights and not self._counted.issuperset(self.active):
            counted = gather_integer(is_counted, self.reducer.process_group)
            self._counted.update(self.active)
            self._run.has_equal_weights = not all(counted)
            if self._run.has_equal_weights and counted.index(0) == self._trainer.global_rank:
                self._warn("All batches weigh the same.")
        return self._run.has_equal_weights

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
        """Weigh the loss of the micro-batch against those before it.

        Returns:
            The loss to pass backward; None if the micro-batch counts nothing.
        """
        self.reducer.defer_hooks()  # those that the step has added, too, if this backward pass is not synchronised
        factor = self._weights.add_batch()
        if not factor:
            return None
        if not self._module.automatic_optimization:
            # Gradients may hold the sum over ranks from a pass before; they are averaged, so that it stays what it is.
            factor = float(len(self.active)) if self._weights.is_sum else 1.0
        return loss if factor == 1.0 else loss * factor

    @contextmanager
    def synchronize(self, note: int = 0) -> Generator[None, None, None]:
        """Synchronise the gradients of a backward pass, unless an accumulation window goes on.

        Args:
            note: A number that the other ranks are told.
        """
        if self._blocked:
            yield
            return
        weight, scale = self._weights.pop()
        divisor = None
        if self._module.automatic_optimization:
            scale *= self._trainer.accumulate_grad_batches  # Lightning has divided the loss by it
            divisor = 1.0 if self._weights.is_sum else None
        else:
            weight = min(weight, 1.0) if self._weights.is_sum else weight
            scale = weight  # the user has made a mean of what has been accumulated
        position = _PASSES * self._trainer.fit_loop.epoch_loop.total_batch_idx + self._passes
        self._passes += 1
        notes = (note, self.has_next_batch is not None and self.has_next_batch.own)
        with self.reducer.synchronize(weight, scale, self._run.preemption.request, position, notes, divisor):
            yield
        assert self.reducer.report is not None
        if self.has_next_batch is not None:
            self.has_next_batch.take([vote for _, vote in self.reducer.report.notes])
        self._synchronized = True
        self._last_weight = weight
        self._run.preemption.agree(self.reducer.stop_agreed)

    @contextmanager
    def discard(self) -> Generator[None, None, None]:
        """Forget the gradients of a micro-batch that counts nothing: its loss may be a mean over nothing, thus nan.

        Its backward pass has to run nevertheless, since it may communicate.
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
        """Put synchronisation off."""
        blocked, self._blocked = self._blocked, True
        try:
            yield
        finally:
            self._blocked = blocked

    def watch(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        """Run an optimizer's closure, and see to it that gradients and buffers have been synchronised.

        Returns:
            The loss; for L-BFGS the mean over the ranks, since it decides from the loss how often to evaluate and how
            far to go. None if a gradient scaler would find no gradient because no batch counts: Lightning's precision
            plugins then leave the step out.

        Raises:
            UnsynchronizedGradientsError: If gradients of the optimizer's parameters have not, see `StepGuard`.
        """
        self._synchronized = False
        loss = closure()
        if self._module.automatic_optimization and not self._synchronized:
            # Lightning leaves out the backward pass where it renews statistics for averaged weights.
            with self.synchronize():
                pass
        self._guard.check(optimizer)  # not every optimizer of Lightning is one of torch, whose steps are all seen
        if loss is None or self._leaves_scaler_nothing(optimizer):
            return None
        return self._mean(loss) if isinstance(optimizer, LBFGS) else loss

    def _leaves_scaler_nothing(self, optimizer: Optimizer) -> bool:
        precision, report = self._trainer.precision_plugin, self.reducer.report
        has_scaler = isinstance(precision, MixedPrecision) and precision.scaler is not None
        if not has_scaler or report is None or report.total_weight or not self._module.automatic_optimization:
            return False
        return all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"])

    def _mean(self, loss: Tensor) -> Tensor:
        """Return the mean of the last loss over the ranks, by weight."""
        weight = torch.tensor(self._last_weight, dtype=torch.float64, device=loss.device)
        weighted = loss.detach() * weight if self._last_weight else torch.zeros_like(weight)
        total = self._trainer.strategy.reduce(torch.stack([weighted, weight]), reduce_op="sum")
        # In double precision on every rank: a rank that skips its batch may not know the type of the others' loss.
        return total[0] / total[1]

    def close(self) -> None:
        """Stop watching the module and optimizers."""
        self._guard.close()
        self.reducer.close()


def check_weighable(module: LightningModule, weight_by: WeightBy) -> None:
    """Check that there are batches to weigh.

    Raises:
        UnsupportedFeatureError: If a callable is to weigh batches that the training step fetches itself.
    """
    if callable(weight_by) and takes_dataloader_iter(module, "training_step"):
        raise UnsupportedFeatureError(
            "`training_step(self, dataloader_iter)` fetches batches itself, so that a callable `weight_by` has none"
            " to weigh. Take the batch instead, or leave `weight_by` out: each batch then counts once."
        )

"""The protocol between a strategy with one process per device and the steps of its rank."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_logging import unwatch_logging, watch_logging
from lightning_ddp_ext.ranks.sample_counts import BatchSamples, sums_and_means
from lightning_ddp_ext.ranks.stall_watch import StallWatch
from lightning_ddp_ext.ranks.synchronized_step import SynchronizedStep

# The reductions of logged values; a mean is made of sums.
_OPERATIONS: dict[Any, Any] = {
    "mean": None, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN
}  # fmt: skip


@dataclass(frozen=True)
class RankContext:
    """Arguments that a strategy passes to the steps of its rank; `step` is None unless the Trainer is fitting."""

    trainer: Trainer
    samples: BatchSamples
    watch: StallWatch
    timeout: timedelta | None
    step: SynchronizedStep | None


class RankSteps:
    """The steps of one rank; torch's `JoinHook` is the model.

    `ExplicitDDPStrategy` creates one per run and calls these methods for each batch. This class serves ranks
    that all have a batch in every step; `Lockstep` overrides the methods for ranks that run out of data.
    """

    def __init__(self, context: RankContext) -> None:
        self.trainer = context.trainer
        self.module = context.trainer.lightning_module
        self.samples = context.samples
        self._step = context.step

    @property
    def step(self) -> SynchronizedStep:
        """The weighing and synchronisation of this rank's gradient, while the Trainer is fitting."""
        assert self._step is not None
        return self._step

    def begin_batch(self, batch: Any) -> None:
        """Begin with the next batch of a loop, before it is moved to the device."""
        self.samples.take(self.trainer, self.module)

    def training_step(self, batch: Any, run: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        """Return the output of `training_step`, which `run` calls."""
        self.step.begin(batch)
        output = run()
        return self.step.skip() if output is None and self.module.automatic_optimization else output

    def backward(self, run: Callable[[], None]) -> None:
        """Run a backward pass."""
        run()

    def synchronize(self) -> AbstractContextManager[None]:
        """Return the context of a backward pass whose gradients are synchronised, unless that is postponed."""
        return self.step.synchronize()

    def evaluation_step(self, batch: Any, run: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        """Return the output of `validation_step` or `test_step`, which `run` calls."""
        return run()

    def reduce(
        self, tensor: Tensor, group: Any, reduce_op: Any, reduce: Callable[[Tensor, Any, Any], Tensor]
    ) -> Tensor:
        """Reduce a value over ranks, such as a logged one; `reduce` is Lightning's implementation."""
        return reduce(tensor, group, reduce_op)

    def close(self) -> None:
        """End the run."""


class WeightedSteps(RankSteps):
    """Steps in which the mean over ranks of a logged value has the weights of the batches."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._weight: float | None = None  # of the values that a step of the LightningModule logs
        self._is_logging = False
        watch_logging(self.trainer, self._log, self.samples.rounded, self.samples.forget)

    @override
    def training_step(self, batch: Any, run: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        return super().training_step(batch, lambda: self._run(run, self.step.batch_weight))

    @override
    def evaluation_step(self, batch: Any, run: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        return self._run(run, self.samples.weight(batch))

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

    @override
    def close(self) -> None:
        unwatch_logging(self.trainer)

    def _run(self, run: Callable[[], STEP_OUTPUT], weight: float) -> STEP_OUTPUT:
        self._weight = weight
        try:
            return run()
        finally:
            self._weight = None

    def _log(self, key: str, metric: Any, proceed: Callable[[], None]) -> None:
        self._is_logging = True
        try:
            proceed()
        finally:
            self._is_logging = False

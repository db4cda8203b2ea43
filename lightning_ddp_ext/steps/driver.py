"""The drivers of steps: they run each batch and each backward pass of a rank, in order."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_ddp_ext._compat.lightning_logging import watch_logging
from lightning_ddp_ext._compat.lightning_loops import leaves_out_backward, without_batch_hooks
from lightning_ddp_ext._lightning import STEP_OUTPUT, LightningModule, Trainer, move_data_to_device
from lightning_ddp_ext.batches.sample_counts import BatchSamples
from lightning_ddp_ext.batches.weights import AccumulationWindow, BatchWeights, CommunicationWatch, WindowSum
from lightning_ddp_ext.distributed.exchange import destroy_group, gather_integers, own_group
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.loaders.lockstep_source import HasNextBatch
from lightning_ddp_ext.loaders.predictions import Predictions
from lightning_ddp_ext.loaders.step_loader import FetchedBatch, Participation
from lightning_ddp_ext.reducer.control import ControlField
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from lightning_ddp_ext.steps.active_collectives import ActiveRankCollectives
from lightning_ddp_ext.steps.balancer import ShareBalancer
from lightning_ddp_ext.steps.logged_values import LoggedValues
from lightning_ddp_ext.steps.optimizer_guard import OptimizerGuard
from lightning_ddp_ext.steps.step_mirror import StepBroadcast, StepMirror

_PASSES = 2**20  # more than a batch has synchronised backward passes; positions of 2 ** 33 batches fit into float64


class GradientDriver:
    """Synchronises gradients, and with them the fields of the control message."""

    def __init__(
        self, reducer: GradientReducer, window: AccumulationWindow, guard: OptimizerGuard, balance: ShareBalancer | None
    ) -> None:
        self.reducer = reducer
        self.window = window
        self.guard = guard
        self.awaits = ""  # the message that this rank sends, in words, for a report of ranks that wait for others
        self._balance = balance
        self._next = reducer.control.add(in_every_message=True)
        if balance is not None:
            balance.connect(reducer.control)

    @contextmanager
    def synchronizing(
        self, of_window: WindowSum, position: int, ahead: HasNextBatch | None, ends_step: bool
    ) -> Iterator[None]:
        """Run a backward pass in the block; then synchronise gradients and end the window, unless it is postponed.

        Gradients of a loss whose factor is 0 are discarded first: the loss may be a mean over nothing, thus nan. The
        backward pass has to run nevertheless, since it may communicate.

        `ahead` knows if this rank has a next batch, if ranks agree on that; `ends_step` says if an optimizer step
        follows.
        """
        reducer, window, balance = self.reducer, self.window, self._balance
        reducer.defer_hooks()  # in passes that are not synchronised too, for hooks that the step has added
        is_weightless, window.skips_pass = window.skips_pass, False
        if is_weightless:
            with reducer.discard_gradients():
                yield
        if window.is_postponed:
            if not is_weightless:
                yield
            return
        window.begin()
        self.guard.send(position)
        self._next.value = 0 if ahead is None else ahead.local
        self.awaits = f"the gradients of {self.guard.describe_position(position)}"
        with reducer.synchronize(*of_window):
            if not is_weightless:
                yield
            if balance is not None:
                balance.send(ends_step)
        self.awaits = ""
        if ahead is not None:
            ahead.receive(self._next.of_ranks)
        if balance is not None:
            balance.receive()

    def exchange(self, ahead: HasNextBatch) -> None:
        """Send the control message without a synchronisation."""
        self._next.value = ahead.local
        self.awaits = f"the end of the step after {self.guard.describe_position(self.guard.position)}"
        self.reducer.control.exchange()
        self.awaits = ""
        ahead.receive(self._next.of_ranks)

    def close(self) -> None:
        """Remove the hooks from the module and from optimizers."""
        self.guard.close()
        self.reducer.close()


def describe_pass(position: int) -> str:
    """Put a position of `StepDriver` into words."""
    return "batch {}, backward pass {}".format(*divmod(position, _PASSES))


class StepDriver:
    """Drives the steps of one rank under the Trainer; the hooks of the strategy call it.

    Each batch of a loop begins with `begin` and ends with `end`, after its last hook. In between come, in training,
    `begin_step`, `run` with the step of the module, and `synchronizing` around each backward pass.

    If ranks run out of data at different times, the step `agrees` on more: a rank without a batch makes a shadow step.
    It runs no code of the module, takes part in synchronisations with weight 0, and receives logged values
    and other changes of the training state from the first active rank.
    """

    def __init__(
        self,
        cleanup: ExitStack,
        trainer: Trainer,
        samples: BatchSamples,
        agrees: bool,
        timeout: timedelta | None,
        weights: BatchWeights | None = None,
        gradient: GradientDriver | None = None,
        balance: ShareBalancer | None = None,
    ) -> None:
        self.gradient = gradient  # None unless the Trainer is fitting, as `weights`
        self.weights = weights
        self.balance = balance  # None unless ranks share batches
        self.predictions: Predictions | None = None  # while the Trainer predicts
        self._trainer = trainer
        self._module: LightningModule = trainer.lightning_module
        self._samples = samples
        self._agrees = agrees
        self._all = Participation(tuple(range(trainer.world_size)), is_shadow=False, is_uneven=False)
        self.participation = self._all  # in the current batch, and of all ranks outside of batches
        control = None if gradient is None else gradient.reducer.control
        self._owned_group = own_group(timeout) if gradient is None and agrees else None
        # Share the reducer's group: each group costs connections, and a communicator on a device.
        group: Any = self._owned_group if gradient is None else gradient.reducer.process_group
        self.group = group
        self._keys = ControlField() if control is None else control.add(in_every_message=True)
        self.logged = LoggedValues(trainer, group, agrees, self._keys)
        self.active = ActiveRankCollectives(group, timeout, trainer.strategy.root_device)
        self.ahead = HasNextBatch(group) if agrees else None
        mirror = None if gradient is None else StepMirror(trainer, self._module, gradient.reducer)
        self._broadcast = StepBroadcast(group, self.logged, mirror)
        self._communication = CommunicationWatch(trainer.global_rank)
        self._evaluating = ExitStack()  # in an uneven batch of evaluation
        self._evaluated = torch.nan  # number of samples in a batch of evaluation, if known
        self._is_stand_in = False  # the batch stands in for the batches of shadow steps
        self._output: dict[str, Any] = {}  # of the step with the stand-in, on the host
        self._number = -1  # of the training batch in the run
        self._passes = 0  # synchronised backward passes of this batch
        self._accumulates = 1  # batches of a window
        self._begins_window = True
        watch_logging(
            cleanup, trainer, self.logged.updating, samples.rounded, self.end, self.end_epoch, self.logged.check_epoch
        )
        # Lightning would refuse a rank without any samples.
        allowed = self._module.allow_zero_length_dataloader_with_multiple_devices
        self._module.allow_zero_length_dataloader_with_multiple_devices = allowed or agrees
        cleanup.callback(self._close, allowed)

    def _close(self, allowed_no_batch: bool) -> None:
        self._module.allow_zero_length_dataloader_with_multiple_devices = allowed_no_batch
        self._evaluating.close()
        self.active.close()
        if self._owned_group is not None and dist.is_initialized():
            destroy_group(self._owned_group)

    @property
    def is_shadow(self) -> bool:
        """Whether this rank has run out of data, while others make a step."""
        return self.participation.is_shadow

    @property
    def _active(self) -> tuple[int, ...]:
        return self.participation.active

    def begin(self, batch: Any, fetched: FetchedBatch) -> bool:
        """Begin with a batch of a loop; return True if `run` moves it to the device, part by part."""
        if batch is None and self._agrees:
            raise UnsupportedFeatureError(
                f"rank {self._trainer.global_rank}: the loader gave None instead of a batch. Lightning would skip the"
                " step on this rank, and the others would wait. Let the loader continue with the next batch instead."
            )
        is_training = self._trainer.training
        self.participation = fetched.participation or self._all
        self._is_stand_in = fetched.is_stand_in
        if fetched.is_stand_in:
            self._output = {}  # of an earlier stand-in
        if self.predictions is not None:
            self.predictions.begin(fetched)
        self._samples.begin(fetched.samples, batch)
        self.logged.begin(self.participation)
        if not is_training:
            self._evaluated = self._samples.weight(batch)
        if self.balance is not None and is_training:
            self.balance.begin_batch(fetched.shares)
        elif self.balance is not None:
            self.balance.begin_evaluation()
        if self.participation.is_uneven:
            self.active.prepare(self._active, self._module)
            if not is_training:
                # In evaluation hooks run among active ranks too: they belong to a batch, not to a step of all ranks.
                around = without_batch_hooks(self._trainer) if self.is_shadow else self.active.redirect()
                self._evaluating.enter_context(around)
        return False

    def begin_step(self, number: int, index: int, accumulates: int) -> None:
        """Begin the training step of a batch, by its number in the run and its index in the epoch."""
        assert self.weights is not None
        self._accumulates, self._begins_window = accumulates, index % accumulates == 0
        self.weights.begin(self._begins_window and self._module.automatic_optimization)
        if self._number != number:  # not when an optimizer runs its closure again
            self._number, self._passes = number, 0
        if self.balance is not None:
            self.balance.count_batch()  # not a batch that a callback skips

    def run(self, step: Callable[..., STEP_OUTPUT], *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the step of the module with these arguments, the batch first; a rank without a batch makes a shadow step.

        Return the output of the step, or a loss of zero with a weight of zero for None. Lightning rejects None on
        several ranks, and would skip the backward pass, for which the other ranks wait.
        """
        assert self.weights is not None
        if self.is_shadow:
            return self._follow()
        if self.participation.is_uneven:
            self._broadcast.remember(self._active)
        with self._redirect():
            self.weights.weigh(next(iter((*args, *kwargs.values()))))
            if leaves_out_backward(self._trainer):
                self.weights.add()
            watch = self._communication.watch(self._trainer.current_epoch, self.weights, self.group)
            with watch, self.logged.step(), self._measure():
                output = step(*args, **kwargs)
        return self._finish(output)

    def _redirect(self) -> AbstractContextManager[None]:
        """Run the collectives of a block on the active ranks only."""
        return self.active.redirect() if self.participation.is_uneven and not self.is_shadow else nullcontext()

    def _measure(self) -> AbstractContextManager[None]:
        return nullcontext() if self.balance is None or self.is_shadow else self.balance.measuring()

    def _finish(self, output: STEP_OUTPUT) -> STEP_OUTPUT:
        assert self.weights is not None and self.gradient is not None  # noqa: PT018
        if output is None and self._module.automatic_optimization:
            self.weights.skip()
            output = self._zero_loss()
        if self.participation.is_uneven:
            self._broadcast.send(self._active, self.gradient.guard, has_ended=True)
        if self._is_stand_in:
            is_dictionary = isinstance(output, dict)
            self._output = apply_to_collection(output, Tensor, lambda one: one.detach().cpu()) if is_dictionary else {}
        self._end_step()
        return output

    def _follow(self) -> STEP_OUTPUT:
        """Take part in a step of the active ranks; return the output for the stand-in with a loss of zero."""
        assert self.gradient is not None
        while not self._broadcast.receive(self._active, self.gradient.guard):
            with self.synchronizing():
                pass
        self._end_step()
        return {**move_data_to_device(self._output, self._module.device), "loss": self._zero_loss()}

    def _zero_loss(self) -> Tensor:
        dtype = cast(torch.dtype, self._module.dtype)
        return torch.zeros((), device=self._module.device, dtype=dtype, requires_grad=True)

    def _end_step(self) -> None:
        # Logged values cannot travel with these gradients, as joined ranks know the keys only after the step.
        if not self._module.automatic_optimization or leaves_out_backward(self._trainer):
            self._exchange()

    def _exchange(self) -> None:
        """Synchronise logged values after a step whose gradients are not synchronised; flags are sent along."""
        assert self.weights is not None and self.gradient is not None  # noqa: PT018
        if self.ahead is not None:
            self.logged.send_keys()
            self.gradient.exchange(self.ahead)
        self.logged.synchronize(self.weights.log_weight, is_compared=self.ahead is not None)

    def weigh_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of a backward pass, weighted relative to earlier ones of the window."""
        assert self.weights is not None and self.gradient is not None  # noqa: PT018
        of_ranks = self.gradient.reducer.control.weights
        return self._communication.weigh_loss(loss, self.weights, of_ranks, len(self._active))

    @contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Run a backward pass in the block; synchronise gradients and logged values, unless that is postponed."""
        assert self.weights is not None and self.gradient is not None  # noqa: PT018
        weights, window, is_automatic = self.weights, self.weights.window, self._module.automatic_optimization
        is_postponed = window.is_postponed
        if is_automatic:
            self._refuse_second_pass(is_postponed)
            self.logged.send_keys()
        elif self.participation.is_uneven and not (is_postponed or self.is_shadow):
            self._broadcast.send(self._active, self.gradient.guard, has_ended=False)  # joined ranks cannot know of it
        position = _PASSES * self._number + self._passes
        self._passes += not is_postponed
        is_in_step = self.balance is not None and self.balance.stop()  # under manual optimization
        of_window = weights.of_window(self._accumulates)
        with (
            self.gradient.synchronizing(of_window, position, self.ahead, ends_step=is_automatic),
            self._redirect(),
            self._measure(),
        ):
            yield
        if is_in_step and self.balance is not None:
            self.balance.start()
        if is_automatic and is_postponed:
            self._exchange()
        elif is_automatic:
            self.logged.synchronize(weights.log_weight, is_compared=True)

    def _refuse_second_pass(self, is_postponed: bool) -> None:
        """Raise an error if an optimizer calls its closure again and Lightning keeps the synchronised gradients."""
        if self._passes and not (self._begins_window or is_postponed):
            raise UnsupportedFeatureError(
                f"rank {self._trainer.global_rank}: the optimizer calls its closure more than once in a step, of which"
                f" `accumulate_grad_batches={self._accumulates}` makes the last batch only. Use larger batches instead"
                " of `accumulate_grad_batches`, or manual optimization."
            )

    def end(self) -> None:
        """End the batch; hooks and logged values that follow belong to no batch."""
        if not self._trainer.training:
            self._evaluating.close()
            if self.predictions is None:  # these log nothing
                if self.is_shadow:
                    self._broadcast.receive(self._active)
                elif self.participation.is_uneven:
                    self._broadcast.send(self._active, None, has_ended=True)
                self.logged.synchronize(self._evaluated)
        elif self.balance is not None:
            self.balance.end_batch(not self._module.automatic_optimization, self._trainer.global_rank)
        self._evaluated = torch.nan
        if self.gradient is not None:
            self.gradient.reducer.buffers.settle()  # all ranks end the batch, and all its hooks have run
            assert self.weights is not None
            self._communication.warn(self.weights, self.gradient.reducer.control.weights)
        self._leave_batch()

    def _leave_batch(self) -> None:
        self._samples.begin(None)
        self.participation = self._all
        self.logged.begin()

    def end_epoch(self) -> None:
        """Compare steps and settings of optimizers, before any hook sees the values of an epoch."""
        if self.gradient is not None and self._trainer.training:
            self._leave_batch()  # which does not end if `on_train_batch_start` has returned -1
            guard = self.gradient.guard
            # The settings may have changed since the last gradients, and the epoch's end has no gradient to carry them.
            guard.compare(gather_integers(guard.numbers(reads_devices=True), self.group))
        self.logged.end_epoch()

"""Steps of all ranks together: a rank that has run out of data has joined, and makes shadow steps."""

import json
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loops import leaves_out_backward, watch_logging, without_batch_hooks
from lightning_ddp_ext._compat.torchmetrics import forget_computed
from lightning_ddp_ext.distributed.exchange import StoreMailbox, destroy_group, gather_integers, own_group
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.join.active_ranks import ActiveRankCollectives
from lightning_ddp_ext.join.combined_loader import LockstepCombinedLoader, SteppedCombinedLoader
from lightning_ddp_ext.join.lockstep_loader import HasNextBatch, UnevenInputs
from lightning_ddp_ext.join.metrics import LoggedValues
from lightning_ddp_ext.join.predictions import Predictions
from lightning_ddp_ext.join.step_mirror import StepMirror
from lightning_ddp_ext.ranks.loaders import FetchedBatch, iterables_and_mode
from lightning_ddp_ext.ranks.sample_counts import BatchSamples
from lightning_ddp_ext.ranks.stall_watch import StallWatch
from lightning_ddp_ext.ranks.steps import RankGradient, RankSteps, zero_loss
from lightning_ddp_ext.resume.resumable_loader import ResumableRng


class LockstepSteps(RankSteps):
    """The steps of ranks that run out of data at different times: a joined rank makes shadow steps.

    In these it runs no code of the module, takes part in synchronisations with weight 0, and receives logged values and
    other changes of the training state from the first active rank.
    """

    def __init__(
        self,
        cleanup: ExitStack,
        trainer: Trainer,
        samples: BatchSamples,
        gradient: RankGradient | None,
        uneven_inputs: UnevenInputs,
        timeout: timedelta | None,
        watch: StallWatch,
    ) -> None:
        super().__init__(trainer, samples, gradient)
        reducer = None if gradient is None else gradient.reducer
        # Share the reducer's group: each group costs connections, and a communicator on a device.
        self.group = own_group(timeout) if reducer is None else reducer.process_group
        self.predictions: Predictions | None = None  # while the Trainer predicts
        self.logged = LoggedValues(self.trainer, self.module, self.group, lambda: self.participation)
        self._uneven_inputs = uneven_inputs
        self._watch = watch
        self._collectives = ActiveRankCollectives(self.group, timeout, trainer.strategy.root_device)
        self._has_next_batch = HasNextBatch(self.group)
        self._mirror = None if reducer is None else StepMirror(self.trainer, self.module, reducer)
        self._messages = StoreMailbox(self.group, timeout, watch.failure)
        watch.on_failure(self._messages.interrupt)
        self._metrics: list[Metric] = []
        self._is_stand_in = False  # the batch stands in for the batches of shadow steps
        self._output: dict[str, Any] = {}  # of the step with the stand-in, on the host
        self._batch_samples = 0.0  # in evaluation; nan if unknown
        self._runs_among_active = False
        self._batch_stack = ExitStack()
        self._loaders: WeakSet[SteppedCombinedLoader] = WeakSet()
        watch_logging(
            cleanup, trainer, self.logged.update, samples.rounded, self.end_batch, self.end_epoch,
            self.logged.check_epoch,
        )  # fmt: skip
        # Lightning would refuse a rank without any samples.
        self._allowed_no_batch = self.module.allow_zero_length_dataloader_with_multiple_devices
        self.module.allow_zero_length_dataloader_with_multiple_devices = True
        cleanup.callback(self._close)

    def _close(self) -> None:
        self.module.allow_zero_length_dataloader_with_multiple_devices = self._allowed_no_batch
        if self._watch.has_exited:
            self._messages.close()
        self._batch_stack.close()
        self._collectives.close()
        for loader in self._loaders:
            loader.close()
        del self.logged  # it refers to this object, and a cycle would keep the process groups and their threads
        if self._mirror is None and dist.is_initialized():  # otherwise it is the reducer's
            destroy_group(self.group)

    def combine_loaders(self, given: Any, rng: ResumableRng | None, prefetcher: Any = None) -> SteppedCombinedLoader:
        """Combine the loaders of a loop so that all ranks make the same steps; `rng` is None in evaluation."""
        loader = LockstepCombinedLoader(
            *iterables_and_mode(given, is_training=rng is not None),
            self.group,
            "join" if rng is None else self._uneven_inputs,  # evaluation includes every sample in any case
            HasNextBatch(self.group) if rng is None else self._has_next_batch,
            rng,
        )
        loader.prefetcher = prefetcher
        self._loaders.add(loader)
        return loader

    @property
    def active_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks with data, while the code of an uneven step runs; None elsewhere."""
        return self._collectives.group if self._runs_among_active else None

    @property
    def _is_source(self) -> bool:
        """Whether this rank sends the effects of an uneven step to the joined ranks: the first active one."""
        return self.participation.is_uneven and self.participation.active[0] == self.trainer.global_rank

    @override
    def begin_fetched(self, batch: Any, fetched: FetchedBatch) -> None:
        if self.predictions is not None:
            self.predictions.begin(fetched)
        super().begin_fetched(batch, fetched)
        self._is_stand_in = fetched.is_stand_in
        if batch is None:
            raise UnsupportedFeatureError(
                f"rank {self.trainer.global_rank}: the loader gave None instead of a batch. Lightning would skip the"
                " step on this rank, and the others would wait. Let the loader continue with the next batch instead."
            )
        self.logged.begin()
        if not self.trainer.training:
            self._batch_samples = self.samples.weight(batch)
        if self.participation.is_uneven:
            self._begin_uneven_batch()

    def _begin_uneven_batch(self) -> None:
        self._collectives.prepare(self.participation.active)
        self._metrics = [one for one in self.module.modules() if isinstance(one, Metric) and one.process_group is None]
        for metric in self._metrics:
            forget_computed(metric)
        if not self.trainer.training:
            # In evaluation hooks run among active ranks too: they belong to a batch, not to a step of all ranks.
            self._batch_stack.enter_context(
                without_batch_hooks(self.trainer) if self.participation.is_shadow else self._redirect_to_active()
            )

    @override
    def training_step(self, batch: Any, run: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        output = self._shadow_step() if self.participation.is_shadow else self._active_step(batch, run)
        if not self.module.automatic_optimization or leaves_out_backward(self.trainer):
            # Here, and not with the gradient: joined ranks know the logged keys only after the step.
            self._exchange_keys_and_flags()
        return output

    def _active_step(self, batch: Any, run: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        if self._is_source and self._mirror is not None:
            self._mirror.remember()
        with self._redirect_to_active():
            output = super().training_step(batch, run)
        self._announce(has_ended=True)
        if self._is_stand_in:
            is_dictionary = isinstance(output, dict)
            self._output = apply_to_collection(output, Tensor, lambda one: one.detach().cpu()) if is_dictionary else {}
        return output

    def _shadow_step(self) -> STEP_OUTPUT:
        """Take part in a step of the active ranks; return the output for the stand-in with a loss of zero."""
        self.gradient.begin_without_data(self.participation.active)
        while not self._await_announcement():
            with self._synchronize():
                pass
        return {**move_data_to_device(self._output, self.module.device), "loss": zero_loss(self.module)}

    @override
    def evaluation_step(self, batch: Any, run: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        return None if self.participation.is_shadow else super().evaluation_step(batch, run)

    @override
    def run_step(self, run: Callable[[], STEP_OUTPUT], weight: float) -> STEP_OUTPUT:
        with self.logged.step():
            return run()

    @override
    def backward(self, run: Callable[[], None]) -> None:
        with self._synchronize():
            if not self.participation.is_shadow:
                with self._redirect_to_active():
                    run()

    @contextmanager
    def _synchronize(self) -> Generator[None, None, None]:
        """Synchronise gradients, logged values and the flags of the next step, unless that is postponed."""
        control, is_automatic = self.gradient.reducer.control, self.module.automatic_optimization
        control.has_next_batch = self._has_next_batch.local
        control.logged_keys = self.logged.keys_hash if is_automatic else 0
        if not is_automatic and not self.gradient.window.is_postponed and not self.participation.is_shadow:
            self._announce(has_ended=False)  # joined ranks cannot know of this backward pass
        with self.gradient.synchronize():
            yield
        if not self.gradient.window.is_postponed:
            assert control.exchanged is not None
            self._has_next_batch.receive(control.exchanged.has_next_batch)
            if is_automatic:
                self.logged.synchronize(self.gradient.log_weight, control.exchanged.logged_keys)
        elif is_automatic:
            self._exchange_keys_and_flags()

    @override
    def end_batch(self) -> None:
        if not self.trainer.training:
            self._batch_stack.close()
            if self.predictions is None:  # these log nothing
                if self.participation.is_shadow:
                    self._await_announcement()
                else:
                    self._announce(has_ended=True)
                self.logged.synchronize(self._batch_samples)
        super().end_batch()
        self.logged.begin()

    def _exchange_keys_and_flags(self) -> None:
        """Synchronise logged values after a step whose gradients are not synchronised; flags are sent along."""
        sent = gather_integers([self.logged.keys_hash, self._has_next_batch.local], self.group)
        keys, has_next_batch = zip(*sent, strict=True)
        self._has_next_batch.receive(has_next_batch)
        self.logged.synchronize(self.gradient.log_weight, keys)

    def _announce(self, has_ended: bool) -> None:
        """Announce a backward pass or the end of an uneven step to the joined ranks. Call on each active rank."""
        if not self._is_source:
            if self.participation.is_uneven:
                self._messages.skip()
            return
        message: dict[str, Any] = {"logged": self.logged.describe() if has_ended else None, "changes_size": None}
        changes = None
        if self._mirror is not None and self.trainer.training:
            guard = self.gradient.guard
            message["steps"] = [guard.steps, guard.optimizers, None if has_ended else guard.numbers()[1]]
            changes = self._mirror.changes() if has_ended else None
        if changes is not None:
            message["changes_size"] = changes.numel()
        self._messages.send(json.dumps(message))
        if changes is not None:
            for rank in sorted(set(self.all_ranks.active).difference(self.participation.active)):
                dist.send(changes, group=self.group, group_dst=rank)

    def _await_announcement(self) -> bool:
        """Receive an announcement on a joined rank; apply the effects of the step and return True if it has ended."""
        message = json.loads(self._messages.wait())
        if "steps" in message:  # of manual optimization, which runs on the active ranks only
            guard = self.gradient.guard
            guard.steps, guard.optimizers, guard.announced = message["steps"]
        if message["logged"] is None:
            return False
        self.logged.adopt(message["logged"])
        if message["changes_size"] is not None:
            assert self._mirror is not None
            changes = torch.empty(message["changes_size"], dtype=torch.uint8)
            dist.recv(changes, group=self.group, group_src=self.participation.active[0])
            self._mirror.take(changes)
        return True

    @override
    def reduce(
        self, tensor: Tensor, group: Any, reduce_op: Any, reduce: Callable[[Tensor, Any, Any], Tensor]
    ) -> Tensor:
        if group is not None or not isinstance(reduce_op, str):
            return reduce(tensor, group or self.active_group, reduce_op)
        return self.logged.reduce(tensor, reduce_op, lambda value: reduce(value, self.active_group, reduce_op))

    @override
    def end_epoch(self) -> None:
        super().end_epoch()
        if self.logged.end_epoch():
            self._messages.forget()  # every rank has read them

    @contextmanager
    def _redirect_to_active(self) -> Generator[None, None, None]:
        """Run the collectives of this block on the active ranks only. Call on an active rank."""
        if not self.participation.is_uneven or self._runs_among_active:
            yield
            return
        self._runs_among_active = True
        for metric in self._metrics:
            metric.process_group = self._collectives.group
        try:
            with self._collectives.redirect():
                yield
        finally:
            self._runs_among_active = False
            for metric in self._metrics:
                metric.process_group = None
                forget_computed(metric)

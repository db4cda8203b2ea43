"""Steps of all ranks together, shadow steps on the ranks that have run out of data."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.memory import recursive_detach
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import is_hook_of_loop
from lightning_ddp_ext._compat.lightning_loaders import active_combined_loader
from lightning_ddp_ext._compat.lightning_logging import unwatch_logging, watch_logging
from lightning_ddp_ext._compat.lightning_loops import leaves_out_backward, without_batch_hooks
from lightning_ddp_ext._compat.lightning_resuming import reload_training_data_after_epoch
from lightning_ddp_ext._compat.torchmetrics import (
    forget_computed,
    unwatch_synchronization,
    watch_synchronization,
)
from lightning_ddp_ext.distributed.exchange import StoreMailbox, gather_integers, own_group
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.join.active_ranks import ActiveRankCollectives
from lightning_ddp_ext.join.combined_loader import LockstepCombinedLoader, ResumableLockstepLoader
from lightning_ddp_ext.join.lockstep_loader import HasNextBatch, StepParticipation, UnevenInputs
from lightning_ddp_ext.join.logged_values import LoggedValues
from lightning_ddp_ext.join.metric_states import synchronize_states
from lightning_ddp_ext.join.step_mirror import StepMirror
from lightning_ddp_ext.ranks.rank_steps import RankContext, RankSteps
from lightning_ddp_ext.ranks.sample_counts import iterables_and_mode
from lightning_ddp_ext.resume.resumable_rng import ResumableRng

_BACKWARD = "backward"


class Lockstep(RankSteps):
    """The steps of ranks that run out of data at different times: a rank without data makes shadow steps.

    In a shadow step the rank runs no code of the module. It takes part in the synchronisation of gradients with weight
    0, and receives logged values and other changes of the training state from the first active rank.
    """

    def __init__(self, context: RankContext, uneven_inputs: UnevenInputs) -> None:
        super().__init__(context)
        reducer = None if context.step is None else context.step.reducer
        # The reducer's, since each group costs connections, and a communicator on a device.
        self.group = own_group(context.timeout) if reducer is None else reducer.process_group
        self.participation: StepParticipation | None = None
        self._uneven_inputs = uneven_inputs
        self._watch = context.watch
        self._active_collectives = ActiveRankCollectives(
            self.group, context.timeout, context.trainer.strategy.root_device
        )
        self._has_next_batch = HasNextBatch(self.group, None if reducer is None else reducer.control)
        self._mirror = None if reducer is None else StepMirror(self.trainer, self.module, reducer)
        self._messages = StoreMailbox(self.group, context.timeout, context.watch.failure)
        context.watch.on_failure(self._messages.interrupt)
        self._metrics: list[Metric] = []
        self._output: dict[str, Any] | None = None
        self._weight = 0.0  # of a batch in evaluation and in the uneven phase
        self._last_uneven: StepParticipation | None = None
        self._is_among_active = False
        self._batch_stack = ExitStack()
        self._loaders: WeakSet[LockstepCombinedLoader] = WeakSet()
        self.logged = LoggedValues(self.trainer, self.module, self.group)
        watch_logging(
            self.trainer,
            self.logged.update,
            self.samples.rounded,
            self._end_batch,
            self._end_epoch,
            self.logged.check_epoch,
        )
        watch_synchronization(synchronize_states)
        # Lightning would refuse a rank without any samples.
        self._allowed_no_batch = self.module.allow_zero_length_dataloader_with_multiple_devices
        self.module.allow_zero_length_dataloader_with_multiple_devices = True

    @override
    def close(self) -> None:
        self.module.allow_zero_length_dataloader_with_multiple_devices = self._allowed_no_batch
        if self._watch.has_exited:
            self._messages.close()
        self._batch_stack.close()
        self._active_collectives.close()
        unwatch_logging(self.trainer)
        for loader in self._loaders:
            loader.close()
        unwatch_synchronization()
        if self._mirror is None and dist.is_initialized():
            dist.destroy_process_group(self.group)

    @property
    def is_shadow(self) -> bool:
        """Whether this rank has no data in this step."""
        return self.participation is not None and self.participation.is_shadow

    @property
    def active_ranks(self) -> tuple[int, ...] | None:
        """The ranks with data, while the code of an uneven step runs; None elsewhere."""
        return self.participation.active if self.participation is not None and self._is_among_active else None

    @property
    def active_group(self) -> dist.ProcessGroup | None:
        """The process group of `active_ranks`."""
        active = self.active_ranks
        return None if active is None else self._active_collectives.group(active)

    @property
    def _is_source(self) -> bool:
        """Whether this rank sends the effects of an uneven step to the ranks without data: the first active one."""
        participation = self.participation
        return (
            participation is not None
            and participation.is_uneven
            and participation.active[0] == self.trainer.global_rank
        )

    @override
    def begin_batch(self, batch: Any) -> None:
        super().begin_batch(batch)
        combined = active_combined_loader(self.trainer)
        if not isinstance(combined, LockstepCombinedLoader) or not is_hook_of_loop(self.module, "batch_to_device"):
            return
        if batch is None:
            raise UnsupportedFeatureError(
                f"rank {self.trainer.global_rank}: the loader gave None instead of a batch. Lightning would skip the"
                " step on this rank, and the others would wait. Let the loader continue with the next batch instead."
            )
        participation = self.participation = combined.participations.popleft()
        self.logged.begin(participation)
        if participation.is_uneven or not self.trainer.training:
            self._weight = self.samples.weight(batch)
        if not participation.is_uneven:
            return
        self._active_collectives.prepare(participation.active)
        if participation is not self._last_uneven:
            self._last_uneven = participation
            self._metrics = [
                part for part in self.module.modules() if isinstance(part, Metric) and part.process_group is None
            ]
            for metric in self._metrics:
                forget_computed(metric)
            if self._mirror is not None and self.trainer.training:
                self._mirror.begin_phase()
        if not self.trainer.training:
            # In evaluation hooks run among active ranks too: they belong to a batch, not to a step of all ranks.
            self._batch_stack.enter_context(
                without_batch_hooks(self.trainer) if participation.is_shadow else self._among_active()
            )

    @override
    def training_step(self, batch: Any, run: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        assert self._mirror is not None
        if self.participation is not None:
            self.step.active = self.participation.active
        if self.is_shadow:
            self.step.begin_without_data()
            while (message := self._messages.wait()) == _BACKWARD:
                with self.synchronize():
                    pass
            self._adopt(json.loads(message))
            output = self._shadow_output()
        else:
            self._output = None
            if self._is_source:
                self._mirror.remember()
            with self._among_active(), self.logged.step():
                output = super().training_step(batch, run)
            if self._is_source:
                self._publish()
            elif self.participation is not None and self.participation.is_uneven:
                self._messages.skip()
            self._output = recursive_detach(output) if isinstance(output, dict) else None
        if not self.module.automatic_optimization or leaves_out_backward(self.trainer):
            # Here, and not with the gradient: ranks without data know the logged keys only after the step.
            self._exchange_logged_keys()
        return output

    def _publish(self) -> None:
        """Send the logged values and the changes of the step to the ranks that make a shadow step."""
        assert self._mirror is not None
        assert self.participation is not None
        try:
            changes = self._mirror.changes(1.0 if math.isnan(self._weight) else self._weight)
        except UnsupportedFeatureError as error:
            self._messages.send(json.dumps({"problem": str(error)}))
            raise
        size = None if changes is None else changes.numel()
        self._messages.send(json.dumps({"logged": self.logged.describe(), "changes": size}))
        if changes is not None:
            for rank in sorted(set(range(self.trainer.world_size)).difference(self.participation.active)):
                dist.send(changes, group=self.group, group_dst=rank)

    def _adopt(self, message: Mapping[str, Any]) -> None:
        """Apply the effects of a step that another rank has published."""
        assert self._mirror is not None
        assert self.participation is not None
        if "problem" in message:
            raise UnsupportedFeatureError(message["problem"])
        self.logged.adopt(message["logged"])
        if message["changes"] is not None:
            changes = torch.empty(message["changes"], dtype=torch.uint8)
            dist.recv(changes, group=self.group, group_src=self.participation.active[0])
            self._mirror.take(changes)

    def _shadow_output(self) -> STEP_OUTPUT:
        """Return the last output of this rank with a loss of zero."""
        dtype = cast(torch.dtype, self.module.dtype)
        loss = torch.zeros((), device=self.module.device, dtype=dtype, requires_grad=True)
        return loss if self._output is None else {**self._output, "loss": loss}

    @override
    def backward(self, run: Callable[[], None]) -> None:
        if not self.is_shadow:
            with self._among_active():
                run()

    @override
    @contextmanager
    def synchronize(self) -> Iterator[None]:
        control, is_automatic = self.step.reducer.control, self.module.automatic_optimization
        control.logged_keys = self.logged.keys_hash if is_automatic else 0
        if not is_automatic and not self.step.is_blocked and not self.is_shadow:
            self._tell(lambda: _BACKWARD)  # the ranks without data cannot know of it
        with super().synchronize():
            yield
        if self.step.is_blocked:
            if is_automatic:
                self._exchange_logged_keys()
            return
        assert control.exchanged is not None
        self._has_next_batch.receive(control.exchanged.has_next_batch)
        if is_automatic:
            self.logged.synchronize(self.step.batch_weight, control.exchanged.logged_keys)

    def _exchange_logged_keys(self) -> None:
        """Synchronise logged values after a step whose gradients are not synchronised; flags are sent along."""
        sent = gather_integers([self.logged.keys_hash, self._has_next_batch.local], self.group)
        keys, has_next_batch = zip(*sent, strict=True)
        self._has_next_batch.receive(has_next_batch)
        self.logged.synchronize(self.step.batch_weight, keys)

    @override
    def evaluation_step(self, batch: Any, run: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        if self.is_shadow:
            return None
        with self.logged.step():
            return run()

    @override
    def reduce(
        self, tensor: Tensor, group: Any, reduce_op: Any, reduce: Callable[[Tensor, Any, Any], Tensor]
    ) -> Tensor:
        if group is not None or not isinstance(reduce_op, str):
            return reduce(tensor, group or self.active_group, reduce_op)
        return self.logged.reduce(tensor, reduce_op, lambda value: reduce(value, self.active_group, reduce_op))

    def _end_batch(self) -> None:
        """End the participation of a batch: the hooks and values that follow belong to no batch."""
        if not self.trainer.training and self.participation is not None:
            self._batch_stack.close()
            if self.is_shadow:
                self.logged.adopt(json.loads(self._messages.wait()))
            else:
                self._tell(lambda: json.dumps(self.logged.describe()))
            self.logged.synchronize(self._weight)
        self.participation = None
        self.logged.end()
        self.samples.forget()

    def _end_epoch(self) -> None:
        if self.logged.end_epoch():
            self._messages.forget()  # every rank has read them

    def _tell(self, describe: Callable[[], str]) -> None:
        """Send a message from the first active rank of an uneven step to the ranks without data."""
        if self.participation is None or not self.participation.is_uneven:
            return
        if self._is_source:
            self._messages.send(describe())
        else:
            self._messages.skip()

    @contextmanager
    def _among_active(self) -> Iterator[None]:
        """Run the collectives of a block on the active ranks only; to be called on an active rank."""
        participation = self.participation
        if participation is None or not participation.is_uneven or self._is_among_active:
            yield
            return
        group = self._active_collectives.group(participation.active)
        self._is_among_active = True
        for metric in self._metrics:
            metric.process_group = group
        try:
            with self._active_collectives.redirect(participation.active):
                yield
        finally:
            self._is_among_active = False
            for metric in self._metrics:
                metric.process_group = None
                forget_computed(metric)

    def combine_loaders(self, given: Any, rng: ResumableRng | None) -> LockstepCombinedLoader:
        """Combine the loaders of a loop so that all ranks make the same steps; `rng` is None in evaluation."""
        given, mode = iterables_and_mode(given, is_training=rng is not None)
        if rng is None:  # evaluation includes every sample in any case
            loader = LockstepCombinedLoader(given, mode, self.group, "join", HasNextBatch(self.group))
        else:
            reload_after_epoch = partial(reload_training_data_after_epoch, self.trainer)
            loader = ResumableLockstepLoader(
                given, mode, self.group, self._uneven_inputs, self._has_next_batch, rng, reload_after_epoch
            )
        self._loaders.add(loader)
        return loader

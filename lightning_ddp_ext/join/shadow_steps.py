"""Steps of all ranks together, of which some may have run out of data."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.memory import recursive_detach
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torchmetrics import Metric

from lightning_ddp_ext._compat.lightning import is_hook_of_loop
from lightning_ddp_ext._compat.loaders import active_combined_loader, combination_mode
from lightning_ddp_ext._compat.loops import without_batch_hooks
from lightning_ddp_ext._compat.resuming import reload_training_data_after_epoch
from lightning_ddp_ext._compat.torchmetrics import (
    forget_computed,
    unwatch_synchronization,
    watch_synchronization,
)
from lightning_ddp_ext.distributed.exchange import StoreMailbox, own_group
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.join.active_ranks import ActiveRankCollectives
from lightning_ddp_ext.join.combined_loader import LockstepCombinedLoader, ResumableLockstepLoader
from lightning_ddp_ext.join.lockstep_loader import HasNextBatch, StepParticipation, UnevenInputs
from lightning_ddp_ext.join.logged_values import LoggedValues
from lightning_ddp_ext.join.metric_states import synchronize_states
from lightning_ddp_ext.join.training_state import StepMirror
from lightning_ddp_ext.ranks.sample_counts import BatchSamples
from lightning_ddp_ext.ranks.stall_watch import StallWatch
from lightning_ddp_ext.resume.resumable_rng import ResumableRng

_BACKWARD = "backward"


class Lockstep:
    """Lets the loops of a Trainer make the same steps on every rank, shadow steps where a rank has no data.

    Args:
        trainer: The Trainer.
        module: Its module.
        uneven_inputs: What to do when a rank runs out of data.
        timeout: Time limit of a collective.
        own: Other process groups in which every rank takes part at any time.
        watch: Knows what any rank has failed of.
        rng: Knows the RNG state of this process, if it trains.
        samples: Knows how many samples a batch has.
        mirror: Gives the ranks without data what a training step changes, if this process trains.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        uneven_inputs: UnevenInputs,
        timeout: timedelta | None,
        own: Iterable[dist.ProcessGroup],
        watch: StallWatch,
        rng: ResumableRng | None,
        samples: BatchSamples,
        mirror: StepMirror | None,
    ) -> None:
        self.group = own_group(timeout)
        self.participation: StepParticipation | None = None
        self._trainer = trainer
        self._module = module
        self._uneven_inputs = uneven_inputs
        self._rng = rng
        self._mirror = mirror
        self._watch = watch
        self._tail = ActiveRankCollectives([self.group, *own], timeout)
        self.has_next_batch = HasNextBatch(self.group, carried=True)
        self._messages = StoreMailbox(self.group, timeout, watch.failure)
        watch.on_failure(self._messages.interrupt)
        self._metrics: list[Metric] = []
        self._output: dict[str, Any] | None = None
        self._samples = samples
        self._weight = 0.0  # of a batch in evaluation and in the uneven phase
        self._last_uneven: StepParticipation | None = None
        self._is_among_active = False
        self._step_stack = ExitStack()
        self.logged = LoggedValues(
            trainer, module, self.has_next_batch, self.group, self._samples, self._end_batch, self._messages.forget
        )
        self._loaders: WeakSet[LockstepCombinedLoader] = WeakSet()
        watch_synchronization(synchronize_states)

    def close(self) -> None:
        """Give loops, logging and process groups back."""
        if self._watch.has_exited:
            self._messages.close()
        self._step_stack.close()
        self._tail.close()
        self.logged.close()
        for loader in self._loaders:
            loader.close()
        unwatch_synchronization()
        if dist.is_initialized():
            dist.destroy_process_group(self.group)

    @property
    def is_shadow(self) -> bool:
        """Whether this rank has no data in this step."""
        return self.participation is not None and self.participation.is_shadow

    @property
    def is_uneven(self) -> bool:
        """Whether any rank has no data in this step."""
        return self.participation is not None and self.participation.is_uneven

    @property
    def active_group(self) -> dist.ProcessGroup | None:
        """The ranks that have data, within a step that some do not take part in."""
        return (
            self._tail.group(self.participation.active)
            if self.participation is not None and self._is_among_active
            else None
        )

    @property
    def gathered_rows(self) -> tuple[int, ...] | None:
        """Which rows of what is gathered have something, within a step that some ranks do not take part in."""
        return self.participation.active if self.participation is not None and self._is_among_active else None

    @property
    def _is_source(self) -> bool:
        """Whether ranks without data learn from this rank what the step does: it is the first that has data."""
        participation = self.participation
        return (
            participation is not None
            and participation.is_uneven
            and participation.active[0] == self._trainer.global_rank
        )

    def begin_step(self, batch: Any) -> None:
        """Take up the next batch of a loop; to be called when it is moved to the device."""
        combined = active_combined_loader(self._trainer)
        if not isinstance(combined, LockstepCombinedLoader) or not is_hook_of_loop(self._module, "batch_to_device"):
            return
        if batch is None:
            raise UnsupportedFeatureError(
                f"rank {self._trainer.global_rank}: the loader gave None instead of a batch. Lightning would leave the"
                " step out on this rank, and the others would wait. Let the loader go on to the next batch instead."
            )
        participation = self.participation = combined.participations.popleft()
        self.logged.begin(participation)
        if participation.is_uneven or not self._trainer.training:
            self._weight = self._samples.weight(batch)
        if not participation.is_uneven:
            return
        self._tail.prepare(participation.active)
        if participation is not self._last_uneven:
            self._last_uneven = participation
            self._metrics = [
                part for part in self._module.modules() if isinstance(part, Metric) and part.process_group is None
            ]
            for metric in self._metrics:
                forget_computed(metric)
            if self._mirror is not None and self._trainer.training:
                self._mirror.begin_phase()
        if not self._trainer.training:
            # In evaluation hooks count too: they belong to a batch, not to a step of all ranks.
            self._step_stack.enter_context(
                without_batch_hooks(self._trainer) if participation.is_shadow else self.among_active()
            )

    def train(self, run: Callable[[], STEP_OUTPUT], synchronize: Callable[[], None]) -> STEP_OUTPUT:
        """Run a training step, or make a shadow step.

        Args:
            run: Runs the step.
            synchronize: On a shadow step, synchronises the gradients of a backward pass that the step contains.

        Returns:
            What the step returns; on a shadow step what it returned last, with a loss of zero.
        """
        assert self._mirror is not None
        if self.is_shadow:
            while (message := self._messages.wait()) == _BACKWARD:
                synchronize()
            self._adopt(json.loads(message))
            return self._shadow_output()
        self._output = None
        if self._is_source:
            self._mirror.remember()
        with self.among_active(), self.logged.step():
            output = run()
        if self._is_source:
            self._publish()
        elif self.is_uneven:
            self._messages.skip()
        self._output = recursive_detach(output) if isinstance(output, dict) else None
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
            for rank in sorted(set(range(self._trainer.world_size)).difference(self.participation.active)):
                dist.send(changes, group=self.group, group_dst=rank)

    def _adopt(self, message: Mapping[str, Any]) -> None:
        """Have what another rank has published."""
        assert self._mirror is not None
        assert self.participation is not None
        if "problem" in message:
            raise UnsupportedFeatureError(message["problem"])
        self.logged.adopt(message["logged"])
        if message["changes"] is not None:
            changes = torch.empty(message["changes"], dtype=torch.uint8)
            dist.recv(changes, group=self.group, group_src=self.participation.active[0])
            self._mirror.take(changes)

    def announce_backward(self) -> None:
        """Tell ranks that make a shadow step of a backward pass within a training step, which they cannot know of."""
        self._tell(lambda: _BACKWARD)

    def evaluate(self, run: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        """Run a step of evaluation, unless this rank has no data."""
        if self.is_shadow:
            return None
        with self.logged.step():
            return run()

    def _end_batch(self) -> None:
        """End a turn: what follows concerns no batch."""
        if not self._trainer.training and self.participation is not None:
            self._step_stack.close()
            self._tell_shadow_ranks()
            self.logged.synchronize(self._weight)
        self.participation = None
        self.logged.end()
        self._samples.forget()

    def _tell_shadow_ranks(self) -> None:
        """Tell ranks that make a shadow step what has been logged; these wait for it."""
        if self.is_shadow:
            self.logged.adopt(json.loads(self._messages.wait()))
        else:
            self._tell(lambda: json.dumps(self.logged.describe()))

    def _tell(self, describe: Callable[[], str]) -> None:
        if self.participation is None or not self.participation.is_uneven:
            return
        if self._is_source:
            self._messages.send(describe())
        else:
            self._messages.skip()

    @contextmanager
    def among_active(self) -> Iterator[None]:
        """Let collectives of a block run among the ranks that have data, if some have not; on one that has."""
        participation = self.participation
        if participation is None or not participation.is_uneven or self._is_among_active:
            yield
            return
        group = self._tail.group(participation.active)
        self._is_among_active = True
        for metric in self._metrics:
            metric.process_group = group
        try:
            with self._tail.redirect(participation.active):
                yield
        finally:
            self._is_among_active = False
            for metric in self._metrics:
                metric.process_group = None
                forget_computed(metric)

    def _shadow_output(self) -> STEP_OUTPUT:
        dtype = cast(torch.dtype, self._module.dtype)
        loss = torch.zeros((), device=self._module.device, dtype=dtype, requires_grad=True)
        return loss if self._output is None else {**self._output, "loss": loss}

    def combine(self, given: Any, is_training: bool) -> LockstepCombinedLoader:
        """Combine the loaders of a loop so that ranks make the same steps."""
        loader = self._make_loader(given, is_training)
        self._loaders.add(loader)
        return loader

    def _make_loader(self, given: Any, is_training: bool) -> LockstepCombinedLoader:
        mode = "max_size_cycle" if is_training else "sequential"  # as in Lightning
        if isinstance(given, CombinedLoader):
            given, mode = given.iterables, combination_mode(given)
        if is_training and self._rng is not None:
            reload_after_epoch = partial(reload_training_data_after_epoch, self._trainer)
            return ResumableLockstepLoader(
                given, mode, self.group, self._uneven_inputs, self.has_next_batch, self._rng, reload_after_epoch
            )
        # Evaluation counts every sample in any case.
        return LockstepCombinedLoader(given, mode, self.group, "join", HasNextBatch(self.group))

"""The steps of ranks that share the batches of their loaders, and the shares that follow their speed."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loaders import active_combined_loader
from lightning_ddp_ext._devices import Timer, are_deterministic, reports_memory
from lightning_ddp_ext.batches.balance_controller import BalanceController
from lightning_ddp_ext.batches.chunk_sizes import ChunkRule
from lightning_ddp_ext.batches.device_memory import PeakMemory
from lightning_ddp_ext.join.predictions import none_finished
from lightning_ddp_ext.join.shadow_steps import LockstepSteps
from lightning_ddp_ext.ranks.sample_counts import (
    BatchSamples,
    FetchAhead,
    FetchedBatch,
    SharedBatch,
    iterables_and_mode,
)
from lightning_ddp_ext.ranks.stall_watch import StallWatch
from lightning_ddp_ext.ranks.steps import RankGradient
from lightning_ddp_ext.reducer.control import StepControl
from lightning_ddp_ext.resume.resumable_rng import ResumableRng
from lightning_ddp_ext.shares.combined_loader import SharedCombinedLoader
from lightning_ddp_ext.shares.table import ShareTable

_TRAINING, _EVALUATION = 0, 1
_TABLE, _SAMPLERS, _CONTROLLER = "table", "samplers", "controller"
_MOST_UNREAD = 100  # steps


@dataclass(slots=True)
class TimedStep:
    """The batches between two synchronisations of gradients, one unless gradients are accumulated."""

    batches: list[SharedBatch] = field(default_factory=list)
    timers: list[Timer] = field(default_factory=list)  # of this rank
    seconds: dict[int, float] = field(default_factory=dict)  # of each rank from which they have arrived


class ComputeTimes:
    """Times of the forward and backward passes of all ranks, without the time in which they wait for each other.

    They are sent with the gradients. On an accelerator, the time of a step is sent when the device has finished it,
    which may be some steps later; the host does not wait.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._timer: Timer | None = None  # while this rank computes
        self._step = TimedStep()
        self._unsent: deque[tuple[int, list[Timer]]] = deque()
        self._unread: dict[int, TimedStep] = {}  # by number, from 1
        self._number = 0

    def start(self) -> None:
        """Start or continue to measure."""
        self._timer = Timer(self._device)
        self._timer.start()

    def stop(self) -> None:
        """Interrupt the measurement, if there is one."""
        if self._timer is not None:
            self._timer.stop()
            self._step.timers.append(self._timer)
            self._timer = None

    def forget(self) -> None:
        """Forget the measurement that has been started."""
        self._timer = None

    def add_batch(self, shared: SharedBatch) -> None:
        """Begin with a batch."""
        self._step.batches.append(shared)

    def end_step(self) -> None:
        """End the step, the same one on all ranks."""
        if not self._step.batches:
            return
        self._number += 1
        self._unsent.append((self._number, self._step.timers))
        self._unread[self._number] = self._step
        self._unread.pop(self._number - _MOST_UNREAD, None)
        self._step = TimedStep()

    def write(self, control: StepControl) -> None:
        """Write the time of the first step that the device has finished, and whose time has not been sent yet."""
        control.timed, control.seconds = 0, 0.0
        if self._unsent and all(timer.is_done() for timer in self._unsent[0][1]):
            control.timed, timers = self._unsent.popleft()
            control.seconds = float(sum(timer.seconds for timer in timers))

    def read(self, control: StepControl) -> list[TimedStep]:
        """Return the steps whose times have now arrived from all ranks."""
        assert control.exchanged is not None
        complete = []
        for rank, (number, seconds) in enumerate(zip(control.exchanged.timed, control.exchanged.seconds, strict=True)):
            step = self._unread.get(int(number))
            if step is not None:
                step.seconds[rank] = seconds
                if len(step.seconds) == self._ranks:
                    complete.append(self._unread.pop(int(number)))
        return complete


def decide(controller: BalanceController, table: ShareTable, step: TimedStep) -> bool:
    """Let a controller decide by the times of a step, and log the decision; return True if it changes the shares."""
    first = step.batches[0]
    # Batches that were divided before the last change say nothing about it, and a partial batch is no measure.
    if first.number < table.held_from or any(batch.nominal != first.nominal for batch in step.batches):
        return False
    seconds = [step.seconds[rank] / len(step.batches) for rank in sorted(step.seconds)]
    decision = controller.observe(first.nominal, seconds)
    if decision is None:
        return False
    rank_zero_info(f'`balance="auto"`, batch {table.begun}: {decision}.')
    return decision.before != decision.after


def make_controller(rule: ChunkRule, ranks: int) -> BalanceController | None:
    """Return a controller if the shares follow the speed of the ranks."""
    if ranks == 1 or not (rule.is_auto or rule.is_free):
        return None
    if are_deterministic():
        if rule.is_auto:
            rank_zero_info('`balance="auto"` is off and batches are shared evenly: it would not be deterministic.')
        return None
    return BalanceController(ranks, "rank")


def has_own_memory(trainer: Trainer) -> bool:
    """Return True if the device of this rank has memory of its own; on the CPU ranks share the memory of the host."""
    devices = getattr(trainer.strategy, "parallel_devices", None) or []
    return len(set(devices)) == len(devices) and reports_memory(trainer.strategy.root_device)


class SharedBatchSteps(LockstepSteps):
    """Steps of which each uses one global batch: a rank without a sample of it makes a shadow step.

    With a controller, shares follow the compute times of the ranks. All ranks make the same decisions, because they
    decide from the same times after the same step.
    """

    def __init__(
        self,
        trainer: Trainer,
        samples: BatchSamples,
        gradient: RankGradient | None,
        timeout: timedelta | None,
        watch: StallWatch,
        table: ShareTable,
        controller: BalanceController | None,
        seed: int,
        batch_dim: int,
        resumed: dict[str, Any] | None,
    ) -> None:
        super().__init__(trainer, samples, gradient, "join", timeout, watch)
        self.shared: SharedBatch | None = None  # the current batch
        self._timed: deque[TimedStep] = deque(maxlen=_MOST_UNREAD)  # the last ones whose times are known
        self._table = table
        self._controller = controller
        self._times = ComputeTimes(trainer.world_size, trainer.strategy.root_device)
        self._peaks = PeakMemory() if controller is not None and has_own_memory(trainer) else None
        self._is_in_step = False
        self._seed = seed
        self._batch_dim = batch_dim
        self._resumed_states: list[Any] = []  # of the samplers' generators
        self._training_loader: SharedCombinedLoader | None = None
        if resumed is not None:
            self._load(resumed)

    @override
    def combine_loaders(
        self, given: Any, rng: ResumableRng | None, prefetcher: FetchAhead | None = None
    ) -> SharedCombinedLoader:
        stage = _EVALUATION if rng is None else _TRAINING
        loader = SharedCombinedLoader(
            *iterables_and_mode(given, is_training=rng is not None),
            self.group,
            self._table,
            lambda: (self._seed, self.trainer.current_epoch, stage),
            rng,
            self._batch_dim,
            [] if rng is None else self._resumed_states,
            none_finished if self.predictions is None else self.predictions.finished,
        )
        if rng is not None:
            self._training_loader, self._resumed_states = loader, []
        self._loaders.add(loader)
        return loader

    @override
    def begin_fetched(self, batch: Any, fetched: FetchedBatch) -> None:
        self.shared = fetched.shares
        assert self.shared is not None
        if self.trainer.training:
            self._table.begin_batch(self.shared.number)
            self._times.add_batch(self.shared)
            self.gradient.reducer.control.drawn = self.shared.agreement
        elif self._peaks is not None:
            self._peaks.forget()
        super().begin_fetched(batch, fetched)

    def indices_of(self, dataloader_idx: int) -> Sequence[Any] | None:
        """Return the indices in the shares of this rank, for the batches of a loader of predictions."""
        combined = active_combined_loader(self.trainer)
        assert isinstance(combined, SharedCombinedLoader)
        return combined.indices_of(dataloader_idx)

    @override
    def run_step(self, run: Callable[[], STEP_OUTPUT], weight: float) -> STEP_OUTPUT:
        if not self.trainer.training:
            return super().run_step(run, weight)
        self._is_in_step = True
        self._times.start()
        try:
            return super().run_step(run, weight)
        finally:
            self._times.stop()
            self._is_in_step = False

    @override
    def backward(self, run: Callable[[], None]) -> None:
        def run_timed() -> None:
            self._times.start()
            run()
            self._times.stop()

        self._times.stop()
        super().backward(run_timed)
        if self._is_in_step:  # under manual optimization
            self._times.start()

    @contextmanager
    def _synchronize(self) -> Generator[None, None, None]:
        control = self.gradient.reducer.control
        with super()._synchronize():
            yield
            if not self.gradient.is_blocked:
                if self.module.automatic_optimization:
                    self._times.end_step()
                self._times.write(control)
        if not self.gradient.is_blocked:
            self._limit(control)
            for step in self._times.read(control):
                self._timed.append(step)
                self._adapt(step)

    @override
    def end_batch(self) -> None:
        is_training = self.trainer.training
        if is_training and not self.module.automatic_optimization:
            self._times.end_step()  # it may have had several backward passes
        if is_training and self._peaks is not None:
            assert self.shared is not None
            own, device = self.shared.nominal[self.trainer.global_rank], self.trainer.strategy.root_device
            limits = self._peaks.observe([own], [device])
            control, most = self.gradient.reducer.control, None if limits is None else limits[0]
            # A limit that follows every change of the peak would change the shares each time.
            if most is not None and not control.most_samples <= most <= 1.1 * control.most_samples:
                control.most_samples = most
        super().end_batch()

    def _limit(self, control: StepControl) -> None:
        """Limit the shares to the memory of all ranks."""
        assert control.exchanged is not None
        controller, loader = self._controller, self._training_loader
        limits = [None if limit < 0 else int(limit) for limit in control.exchanged.most_samples]
        if controller is None or loader is None or limits == controller.limits:
            return
        controller.limits = limits
        known = ", ".join(f"{limit} on rank {rank}" for rank, limit in enumerate(limits) if limit is not None)
        rank_zero_info(f'`balance="auto"`, batch {self._table.begun}: samples that fit into the memory: {known}.')
        self._table.change(loader.undrawn, controller.shares, limits)

    def take_timed(self) -> list[TimedStep]:
        """Return and forget the steps whose times have arrived from all ranks."""
        timed = list(self._timed)
        self._timed.clear()
        return timed

    def _adapt(self, step: TimedStep) -> None:
        """Adapt the shares to the times of a step."""
        loader = self._training_loader
        if self._controller is not None and loader is not None and decide(self._controller, self._table, step):
            self._table.change(loader.undrawn, self._controller.shares, self._controller.limits)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run that resumes on any number of ranks, beside the position in the data."""
        loader = self._training_loader
        return {
            _TABLE: self._table.state_dict(is_within_epoch=loader is not None and loader.is_within_epoch),
            _SAMPLERS: self._resumed_states if loader is None else loader.sampler_states(),
            _CONTROLLER: None if self._controller is None else self._controller.state_dict(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._resumed_states = state[_SAMPLERS]
        controller = state[_CONTROLLER]
        if controller is None or self._controller is None:
            return
        if len(controller["shares"]) != self.trainer.world_size:
            rank_zero_info('`balance="auto"` starts with even shares: the checkpoint has another number of ranks.')
            return
        self._controller.load_state_dict(controller)
        self._table.load_state_dict(state[_TABLE])

"""The steps of ranks that share the batches of their loaders, under Lightning."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_ddp_ext._devices import reports_memory
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext.batches.balance_controller import PeakMemory
from lightning_ddp_ext.join.predictions import none_finished
from lightning_ddp_ext.join.shadow_steps import LockstepSteps
from lightning_ddp_ext.loaders.lockstep_source import HasNextBatch
from lightning_ddp_ext.loaders.step_loader import FetchedBatch, StepLoader, iterables_and_mode
from lightning_ddp_ext.ranks.sample_counts import BatchSamples
from lightning_ddp_ext.ranks.stall_watch import StallWatch
from lightning_ddp_ext.ranks.steps import RankGradient
from lightning_ddp_ext.resume.rng_state import ResumableRng
from lightning_ddp_ext.shares.balancer import ShareBalancer
from lightning_ddp_ext.shares.shared_source import SharedSource
from lightning_ddp_ext.shares.table import SharedBatch, ShareTable


def has_own_memory(trainer: Trainer) -> bool:
    """Return True if the device of this rank has memory of its own; on the CPU ranks share the memory of the host."""
    devices = getattr(trainer.strategy, "parallel_devices", None) or []
    return len(set(devices)) == len(devices) and reports_memory(trainer.strategy.root_device)


class SharedBatchSteps(LockstepSteps):
    """Steps of which each uses one global batch: a rank without a sample of it makes a shadow step."""

    def __init__(
        self,
        cleanup: ExitStack,
        trainer: Trainer,
        samples: BatchSamples,
        gradient: RankGradient | None,
        timeout: timedelta | None,
        watch: StallWatch,
        table: ShareTable,
        seed: int,
        resumed: dict[str, Any],
    ) -> None:
        super().__init__(cleanup, trainer, samples, gradient, "join", timeout, watch)
        self.shared: SharedBatch | None = None  # the current batch
        rule = None if gradient is None else table.rule
        self.balancer = ShareBalancer(rule, trainer.world_size, trainer.strategy.root_device, rank_zero_info)
        self.balancer.add(table)
        self._table = table
        self._peaks = PeakMemory() if self.balancer.controller is not None and has_own_memory(trainer) else None
        self._seed = seed
        self._resumed_states: list[Any] = []  # of the samplers' generators
        self._training_loader: StepLoader | None = None
        if resumed:
            self._resumed_states = resumed["samplers"]
            if self.balancer.load_state_dict(resumed["controller"]):
                table.load_state_dict(resumed["table"])

    @override
    def combine_loaders(self, given: Any, rng: ResumableRng | None, prefetcher: Any = None) -> StepLoader:
        stage = int(rng is None)  # evaluation draws other numbers than training
        source = SharedSource(
            self.group,
            self._table,
            [self._seed],
            lambda place: (self.trainer.current_epoch, stage, place),
            self.samples.batch_dim,
            HasNextBatch(self.group) if rng is None else self._has_next_batch,
            [] if rng is None else self._resumed_states,
            none_finished if self.predictions is None else self.predictions.finished,
        )
        loader = StepLoader(*iterables_and_mode(given, is_training=rng is not None), source, rng)
        if rng is not None:
            self._training_loader, self._resumed_states = loader, []
            for one in loader.flattened:
                self._table.check_batch_size(getattr(getattr(one, "batch_sampler", None), "batch_size", None))
        self._loaders.add(loader)
        return loader

    @override
    def begin_fetched(self, batch: Any, fetched: FetchedBatch) -> None:
        self.shared = fetched.shares
        assert self.shared is not None
        if self.trainer.training:
            self.balancer.begin_batch(self.shared)
        elif self._peaks is not None:
            self._peaks.forget()
        super().begin_fetched(batch, fetched)

    @override
    def training_step(self, batch: Any, run: Callable[[], STEP_OUTPUT]) -> STEP_OUTPUT:
        assert self.shared is not None
        self.balancer.count_batch(self.gradient.reducer.control, self.shared)  # not a batch that a callback skips
        return super().training_step(batch, run)

    @override
    def run_step(self, run: Callable[[], STEP_OUTPUT], weight: float) -> STEP_OUTPUT:
        if not self.trainer.training:
            return super().run_step(run, weight)
        self.balancer.start()
        try:
            return super().run_step(run, weight)
        finally:
            self.balancer.stop()

    @override
    def backward(self, run: Callable[[], None]) -> None:
        def run_timed() -> None:
            self.balancer.start()
            run()
            self.balancer.stop()

        is_in_step = self.balancer.stop()  # under manual optimization
        super().backward(run_timed)
        if is_in_step:
            self.balancer.start()

    @contextmanager
    @override
    def _synchronize(self) -> Generator[None, None, None]:
        synchronizing, ends_step = super()._synchronize(), self.module.automatic_optimization
        control = self.gradient.reducer.control
        is_postponed = self.gradient.window.is_postponed
        with synchronizing if is_postponed else self.balancer.exchange(synchronizing, control, ends_step):
            yield

    @override
    def end_batch(self) -> None:
        is_training = self.trainer.training
        if is_training and not self.module.automatic_optimization:
            self.balancer.end_step()  # it may have had several backward passes
        if is_training and self._peaks is not None:
            assert self.shared is not None
            own, device = self.shared.nominal[self.trainer.global_rank], self.trainer.strategy.root_device
            limits = self._peaks.observe([own], [device])
            control, most = self.gradient.reducer.control, None if limits is None else limits[0]
            # A limit that follows every change of the peak would change the shares each time.
            if most is not None and not control.most_samples <= most <= 1.1 * control.most_samples:
                control.most_samples = most
        super().end_batch()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run that resumes on any number of ranks, beside the position in the data."""
        is_within_epoch, samplers = False, self._resumed_states
        loader = self._training_loader
        if loader is not None:
            assert isinstance(loader.source, SharedSource)
            is_within_epoch, samplers = bool(loader.used), loader.source.sampler_states(loader)
        return {
            "table": self._table.state_dict(is_within_epoch),
            "samplers": samplers,
            "controller": self.balancer.state_dict(),
        }

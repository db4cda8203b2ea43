"""Shares that follow the measured speed of the ranks."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_ddp_ext._devices import Timer, are_deterministic, reports_memory
from lightning_ddp_ext.batches.balance_controller import BalanceController, PeakMemory
from lightning_ddp_ext.batches.chunk_sizes import ChunkRule
from lightning_ddp_ext.errors import RanksOutOfStepError
from lightning_ddp_ext.reducer.control import Control, ControlField
from lightning_ddp_ext.shares.share_table import SharedBatch, ShareTable

_MOST_UNREAD = 100  # steps


@dataclass(slots=True)
class RankTimes:
    """The batches between two synchronisations of gradients, one unless gradients are accumulated."""

    batches: list[SharedBatch] = field(default_factory=list)
    timers: list[Timer] = field(default_factory=list)  # of this rank
    seconds: dict[int, float] = field(default_factory=dict)  # by rank; 0 without a sample, or if not measured


class ShareBalancer:
    """Measures the forward and backward passes of all ranks, and lets shares follow the times if a rule is given.

    Times exclude the time in which ranks wait for each other. They are sent with the gradients; on an accelerator when
    the device has finished the step, which may be some steps later, so that the host does not wait. All ranks make the
    same decisions, because they decide from the same times after the same step.
    """

    def __init__(
        self,
        rule: ChunkRule | None,
        ranks: int,
        device: torch.device,
        inform: Callable[[str], None],
        watches_memory: bool = False,
        unit: str = "samples",
    ) -> None:
        self.controller = None if rule is None else _make_controller(rule, ranks, inform, unit)
        self._tables: list[ShareTable] = []
        self._ranks = ranks
        self._device = device
        self._inform = inform
        self._counted: SharedBatch | None = None  # the last batch that is part of a step
        self._timer: Timer | None = None  # while this rank computes
        self._interrupted: list[Timer] = []  # of the current batch, before loops over other loaders
        self._step = RankTimes()
        self._batches: list[SharedBatch] = []  # of the step that is being synchronised
        self._unsent: deque[tuple[int, list[Timer]]] = deque()
        self._unread: dict[int, RankTimes] = {}  # by number, from 1
        self._read: deque[RankTimes] = deque(maxlen=_MOST_UNREAD)  # the last ones whose times are known
        self._number = 0
        self.shared: SharedBatch | None = None  # the current batch of training
        self._peaks = PeakMemory() if self.controller is not None and watches_memory else None
        self._drawn = ControlField()  # hash of the samples that ranks have drawn, of the division too
        self._timed = ControlField()  # number of a step whose time is known by now, from 1; 0 for none
        self._seconds = ControlField()  # of this rank in that step
        self._most_samples = ControlField()  # that this rank has memory for; -1 if that is not known
        self._most_samples.value = -1

    def connect(self, control: Control) -> None:
        """Send times and limits with each control message, and compare the samples that ranks have drawn."""
        most = self._most_samples.value
        self._drawn, self._timed, self._seconds = control.add(_compare_drawn), control.add(), control.add()
        self._most_samples = control.add()
        self._most_samples.value = most

    def add(self, table: ShareTable) -> None:
        """Let the shares of a table follow the speed of the ranks, from the present shares on."""
        self._tables.append(table)
        if self.controller is not None:
            self.controller.least_samples = 1 + table.avoids_single_samples
            table.change(0, self.controller.shares, self.controller.limits)

    def begin_batch(self, shared: SharedBatch) -> None:
        """Begin with a batch, under Fabric maybe one of evaluation; forget a measurement that was not stopped."""
        shared.table.begun = shared.number + 1
        self.shared = shared
        self._forget()

    def begin_evaluation(self) -> None:
        """Begin with a batch of evaluation under the Trainer, whose memory says nothing about training."""
        self.shared = None
        if self._peaks is not None:
            self._peaks.forget()

    def _forget(self) -> None:
        self._timer, self._interrupted = None, []

    def count_batch(self, shared: SharedBatch | None = None) -> None:
        """Make a batch, by default the current one, part of the step, once; compare its indices among the ranks."""
        shared = self.shared if shared is None else shared
        assert shared is not None
        self._drawn.value = shared.agreement
        if self._counted is not shared:
            self._step.batches.append(shared)
            self._counted = shared

    def start(self) -> None:
        """Start or continue to measure."""
        self._timer = Timer(self._device)
        self._timer.start()

    def stop(self) -> bool:
        """Interrupt the measurement; return True if there was one."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.stop()
            self._step.timers += [*self._interrupted, timer]
            self._interrupted = []
        return timer is not None

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Interrupt the measurement of a batch during a loop over another loader."""
        timer, interrupted = self._timer, self._interrupted
        if timer is not None:
            timer.stop()
            interrupted = [*interrupted, timer]
        self._forget()
        try:
            yield
        finally:
            self._forget()
            if timer is not None:
                self.start()
                self._interrupted = interrupted

    def end_step(self) -> None:
        """End the step, the same one on all ranks."""
        self.stop()
        step, self._step = self._step, RankTimes()
        if not step.batches:
            return
        self._number += 1
        self._unsent.append((self._number, step.timers))
        self._unread[self._number] = step
        self._unread.pop(self._number - _MOST_UNREAD, None)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the block."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def end_batch(self, ends_step: bool, rank: int) -> None:
        """End a batch of training, maybe with its step; limit the samples by the memory that it has taken."""
        shared, self.shared = self.shared, None
        if shared is None:
            return
        if ends_step:
            self.end_step()
        limits = None if self._peaks is None else self._peaks.observe([shared.nominal[rank]], [self._device])
        most, sent = None if limits is None else limits[0], self._most_samples
        # A limit that follows every change of the peak would change the shares each time.
        if most is not None and not sent.value <= most <= 1.1 * sent.value:
            sent.value = most

    def send(self, ends_step: bool) -> None:
        """Send times with the control message of the synchronisation that ends now."""
        self._batches = self._step.batches
        if ends_step:
            self.end_step()
        self._timed.value = self._seconds.value = 0.0
        if self._unsent and all(timer.is_done() for timer in self._unsent[0][1]):
            self._timed.value, timers = self._unsent.popleft()
            self._seconds.value = float(sum(timer.seconds for timer in timers))

    def receive(self) -> None:
        """Change the shares by the times and limits of all ranks in the last control message."""
        if self._batches:
            limits = [None if limit < 0 else int(limit) for limit in self._most_samples.of_ranks]
            self._limit(limits, self._batches[-1].table)
        for rank, (number, seconds) in enumerate(zip(self._timed.of_ranks, self._seconds.of_ranks, strict=True)):
            step = self._unread.get(int(number))
            if step is not None:
                step.seconds[rank] = seconds
                if len(step.seconds) == self._ranks:  # the times have arrived from all ranks
                    self._read.append(self._unread.pop(int(number)))
                    self._decide(step)

    def _limit(self, limits: list[int | None], table: ShareTable) -> None:
        """Limit the shares to the memory of all ranks."""
        controller = self.controller
        if controller is not None and limits != controller.limits:
            controller.limits = limits
            known = ", ".join(f"{limit} on rank {rank}" for rank, limit in enumerate(limits) if limit is not None)
            self._change(controller, table, f"samples that fit into the memory: {known}")

    def _decide(self, step: RankTimes) -> None:
        """Let the controller decide by the times of a step."""
        controller, first = self.controller, step.batches[0]
        # A step without a measurement on every rank says nothing.
        if controller is None or not all(step.seconds.values()):
            return
        # Batches that were divided before the last change say nothing about it, and a partial batch is no measure.
        if first.number < first.table.held_from or any(batch.nominal != first.nominal for batch in step.batches):
            return
        seconds = [step.seconds[rank] / len(step.batches) for rank in sorted(step.seconds)]
        decision = controller.observe(first.nominal, seconds)
        if decision is not None:
            self._change(controller, first.table, f"{decision}", decision.before != decision.after)

    def _change(self, controller: BalanceController, table: ShareTable, reason: str, changes: bool = True) -> None:
        self._inform(f'`balance="auto"`, batch {table.begun}: {reason}.')
        # Use one lead for all tables: loaders used in one step must be divided alike.
        lead = max(own.lead for own in self._tables)
        for own in self._tables if changes else ():
            own.change(own.begun + lead, controller.shares, controller.limits)

    def take_timed(self) -> list[RankTimes]:
        """Return and forget the steps whose times have arrived from all ranks."""
        timed = list(self._read)
        self._read.clear()
        return timed

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the controller, in plain values; None if shares do not follow the speed of the ranks."""
        return None if self.controller is None else self.controller.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> bool:
        """Restore a saved state and return True, if the shares follow the speed of as many ranks as before."""
        if self.controller is None or state is None:
            return False
        if len(state["shares"]) != self._ranks:
            self._inform('`balance="auto"` starts with even shares: the checkpoint is of another number of ranks.')
            return False
        self.controller.load_state_dict(state)
        return True


def has_own_memory(device: torch.device, of_node: Sequence[torch.device] | None) -> bool:
    """Return True if the device of this rank has separate memory; on the CPU ranks share the memory of the host."""
    devices = of_node or []
    return len({*devices}) == len(devices) and reports_memory(device)


def _make_controller(rule: ChunkRule, ranks: int, inform: Callable[[str], None], unit: str) -> BalanceController | None:
    if ranks == 1 or not (rule.is_auto or rule.is_free):
        return None
    if are_deterministic() and unit == "samples":  # results do not depend on the shares of virtual ranks
        if rule.is_auto:
            inform('`balance="auto"` is off, because measured times are not deterministic: batches are divided evenly.')
        return None
    return BalanceController(ranks, "rank", unit)


def _compare_drawn(drawn: Sequence[float]) -> None:
    if len(set(drawn)) > 1:
        other = next(rank for rank, number in enumerate(drawn) if number != drawn[0])
        raise RanksOutOfStepError(
            f"rank {other} has drawn other samples than rank 0 for the batch that they share. Use a sampler or a"
            " stream that draws alike on every rank, whatever else the rank does, or `ddp_join`."
        )

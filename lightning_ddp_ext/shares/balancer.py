"""Shares that follow the measured speed of the ranks."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_ddp_ext._devices import Timer, are_deterministic
from lightning_ddp_ext.batches.balance_controller import BalanceController
from lightning_ddp_ext.batches.chunk_sizes import ChunkRule
from lightning_ddp_ext.reducer.control import StepControl
from lightning_ddp_ext.shares.table import SharedBatch, ShareTable

_MOST_UNREAD = 100  # steps


@dataclass(slots=True)
class TimedStep:
    """The batches between two synchronisations of gradients, one unless gradients are accumulated."""

    batches: list[SharedBatch] = field(default_factory=list)
    timers: list[Timer] = field(default_factory=list)  # of this rank
    seconds: dict[int, float] = field(default_factory=dict)  # by rank, see `StepControl.seconds`


class ShareBalancer:
    """Measures the forward and backward passes of all ranks, and lets shares follow the times if a rule is given.

    Times exclude the time in which ranks wait for each other. They are sent with the gradients; on an accelerator when
    the device has finished the step, which may be some steps later, so that the host does not wait. All ranks make the
    same decisions, because they decide from the same times after the same step.
    """

    def __init__(self, rule: ChunkRule | None, ranks: int, device: torch.device, inform: Callable[[str], None]) -> None:
        self.controller = None if rule is None else _make_controller(rule, ranks, inform)
        self._tables: list[ShareTable] = []
        self._ranks = ranks
        self._device = device
        self._inform = inform
        self._counted: SharedBatch | None = None  # the last batch that is part of a step
        self._timer: Timer | None = None  # while this rank computes
        self._interrupted: list[Timer] = []  # of the current batch, before loops over other loaders
        self._step = TimedStep()
        self._unsent: deque[tuple[int, list[Timer]]] = deque()
        self._unread: dict[int, TimedStep] = {}  # by number, from 1
        self._timed: deque[TimedStep] = deque(maxlen=_MOST_UNREAD)  # the last ones whose times are known
        self._number = 0

    def add(self, table: ShareTable) -> None:
        """Let the shares of a table follow the speed of the ranks, from the present shares on."""
        self._tables.append(table)
        if self.controller is not None:
            table.change(0, self.controller.shares, self.controller.limits)

    def begin_batch(self, shared: SharedBatch) -> None:
        """Begin with a batch, under Fabric maybe one of evaluation; forget a measurement that was not stopped."""
        shared.table.begun = shared.number + 1
        self._forget()

    def _forget(self) -> None:
        self._timer, self._interrupted = None, []

    def count_batch(self, control: StepControl, shared: SharedBatch) -> None:
        """Make a batch part of the step, once, and compare its indices among the ranks."""
        control.drawn = shared.agreement
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
        step, self._step = self._step, TimedStep()
        if not step.batches:
            return
        self._number += 1
        self._unsent.append((self._number, step.timers))
        self._unread[self._number] = step
        self._unread.pop(self._number - _MOST_UNREAD, None)

    @contextmanager
    def exchange(
        self, synchronizing: AbstractContextManager[None], control: StepControl, ends_step: bool
    ) -> Iterator[None]:
        """Synchronise gradients at the end of the block; send times with them, and change the shares by the answers."""
        with synchronizing:
            yield
            batches = self._step.batches
            if ends_step:
                self.end_step()
            control.timed, control.seconds = 0, 0.0
            if self._unsent and all(timer.is_done() for timer in self._unsent[0][1]):
                control.timed, timers = self._unsent.popleft()
                control.seconds = float(sum(timer.seconds for timer in timers))
        exchanged = control.exchanged
        assert exchanged is not None
        if batches:
            self._limit([None if limit < 0 else int(limit) for limit in exchanged.most_samples], batches[-1].table)
        for rank, (number, seconds) in enumerate(zip(exchanged.timed, exchanged.seconds, strict=True)):
            step = self._unread.get(int(number))
            if step is not None:
                step.seconds[rank] = seconds
                if len(step.seconds) == self._ranks:  # the times have arrived from all ranks
                    self._timed.append(self._unread.pop(int(number)))
                    self._decide(step)

    def _limit(self, limits: list[int | None], table: ShareTable) -> None:
        """Limit the shares to the memory of all ranks."""
        controller = self.controller
        if controller is not None and limits != controller.limits:
            controller.limits = limits
            known = ", ".join(f"{limit} on rank {rank}" for rank, limit in enumerate(limits) if limit is not None)
            self._change(controller, table, f"samples that fit into the memory: {known}")

    def _decide(self, step: TimedStep) -> None:
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

    def take_timed(self) -> list[TimedStep]:
        """Return and forget the steps whose times have arrived from all ranks."""
        timed = list(self._timed)
        self._timed.clear()
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


def _make_controller(rule: ChunkRule, ranks: int, inform: Callable[[str], None]) -> BalanceController | None:
    if ranks == 1 or not (rule.is_auto or rule.is_free):
        return None
    if are_deterministic():
        if rule.is_auto:
            inform('`balance="auto"` is off, because measured times are not deterministic: batches are divided evenly.')
        return None
    return BalanceController(ranks, "rank")

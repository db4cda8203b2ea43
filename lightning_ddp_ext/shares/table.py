"""The sizes of the ranks' shares of every global batch, and changes that follow the speed of the ranks."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_ddp_ext._compat.torch import BatchNorm
from lightning_ddp_ext._devices import Timer, are_deterministic
from lightning_ddp_ext.batches.balance_controller import BalanceController, divide_by_shares
from lightning_ddp_ext.batches.chunk_sizes import ChunkRule, merge_single_samples
from lightning_ddp_ext.errors import BatchSplitError
from lightning_ddp_ext.ranks.sample_counts import SharedBatch
from lightning_ddp_ext.reducer.control import StepControl
from lightning_ddp_ext.shares.costs import Deal, SampleCost

_CHANGES = "changes"
_MOST_UNREAD = 100  # steps
_MANY = 10**9  # samples, of which a rank gets one if the options give it a share at all


def refuses_single_samples(module: nn.Module) -> bool:
    """Return True if a module has batch normalisation, which needs two samples on a rank in training."""
    norms = [part for part in module.modules() if isinstance(part, BatchNorm)]
    return any(not isinstance(norm, nn.SyncBatchNorm) for norm in norms)


@dataclass(frozen=True, slots=True)
class Division:
    """How a global batch is divided among ranks, by shares of a controller or by a rule; picklable for workers."""

    rule: ChunkRule
    ranks: int
    shares: list[float] | None
    limits: list[int | None]
    avoids_single_samples: bool
    deal: Deal | None  # deals samples by their costs

    def divide(self, batch_size: int, costs: Sequence[float] | None) -> "DividedBatch":
        """Divide a batch, whose samples have costs or all cost the same."""
        if self.shares is None:
            nominal = self._merged(self.rule.divide(batch_size, self.ranks))
        else:
            nominal = self._merged(divide_by_shares(batch_size, self.shares, self.limits))
        if costs is None or self.deal is None:
            return DividedBatch(range(batch_size), nominal, nominal)
        chunks = self.deal(nominal, costs)
        return DividedBatch([*chain(*chunks)], self._merged([*map(len, chunks)]), nominal)

    def _merged(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(merge_single_samples(sizes) if self.avoids_single_samples and sum(sizes) > 1 else sizes)


@dataclass(frozen=True, slots=True)
class DividedBatch:
    """The shares of a batch: its positions in the order of the ranks, and how many each rank has."""

    order: Sequence[int]
    sizes: tuple[int, ...]
    nominal: tuple[int, ...]  # the sizes if all samples had the same cost

    def own(self, batch: Any, rank: int) -> Any:
        """Return the part of a rank of a list, a tuple or an array."""
        start = sum(self.sizes[:rank])
        end = start + self.sizes[rank]
        if isinstance(self.order, range):
            return batch[start:end]
        return [batch[position] for position in self.order[start:end]]


class ShareTable:
    """Divides global batches among ranks, the same on every rank; batches are numbered over the whole run.

    Fixed rules hold for all batches. The shares of a controller hold from a batch on that no rank has fetched yet, so
    that all ranks divide a batch alike, however early each of them fetches it.
    """

    def __init__(
        self,
        rule: ChunkRule,
        ranks: int,
        avoids_single_samples: bool = False,
        cost: SampleCost | None = None,
    ) -> None:
        self.cost = cost if ranks > 1 else None  # of a sample; None if all samples cost the same
        self.begun = 0  # batches that training has begun
        self.rule = rule
        self._ranks = ranks
        self.avoids_single_samples = avoids_single_samples  # batch normalisation refuses them in training
        self._first = 0  # number of the first batch of this epoch
        self._changes: list[tuple[int, list[float], list[int | None]]] = []  # with the first batch for which they hold

    def check_batch_size(self, batch_size: int) -> None:
        """Raise an error if a rank gets no sample of such batches, although the options give it a share."""
        sizes = self.rule.divide(batch_size, self._ranks)
        for rank, (size, proportion) in enumerate(zip(sizes, self.rule.divide(_MANY, self._ranks), strict=True)):
            if proportion and not size:
                raise BatchSplitError(
                    f"rank {rank} never gets a sample: batches of {batch_size} are shared as {sizes}.",
                    "Use larger batches or fewer devices, or give the rank no share.",
                )

    def begin_epoch(self, skip: int) -> int:
        """Begin an epoch, of which an interrupted run has used `skip` batches; return the number of its first batch."""
        self._first = self.begun
        self.begun += skip
        held = [change for change in self._changes if change[0] <= self._first][-1:]
        self._changes = held + [change for change in self._changes if change[0] > self._first]
        return self._first

    def change(self, number: int, shares: Sequence[float], limits: Sequence[int | None]) -> None:
        """Divide by other shares from the batch of this number on."""
        self._changes.append((number, list(shares), list(limits)))

    @property
    def held_from(self) -> int:
        """Number of the first batch for which the last change holds."""
        return self._changes[-1][0] if self._changes else 0

    def division(self, number: int, is_training: bool) -> Division:
        """Return how the global batch of this number is divided."""
        held = next((change for change in reversed(self._changes) if change[0] <= number), None)
        shares, limits = (None, []) if held is None else held[1:]
        avoids_single_samples = is_training and self.avoids_single_samples
        deal = None if self.cost is None or not is_training else self.cost.deal
        return Division(self.rule, self._ranks, shares, limits, avoids_single_samples, deal)

    def state_dict(self, is_within_epoch: bool) -> dict[str, Any]:
        """Return the shares since the beginning of this epoch, or for the next one, whose first batch gets number 0."""
        first = self._first if is_within_epoch else self.begun
        changes = [[max(0, number - first), shares, limits] for number, shares, limits in self._changes]
        return {_CHANGES: changes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state of as many ranks."""
        self._changes = [(number, shares, limits) for number, shares, limits in state[_CHANGES]]


@dataclass(slots=True)
class TimedStep:
    """The batches between two synchronisations of gradients, one unless gradients are accumulated."""

    batches: list[SharedBatch] = field(default_factory=list)
    timers: list[Timer] = field(default_factory=list)  # of this rank
    seconds: dict[int, float] = field(default_factory=dict)  # of each rank from which they have arrived


class ShareBalancer:
    """Measures the forward and backward passes of all ranks, and lets shares follow the times if a rule is given.

    Times exclude the time in which ranks wait for each other. They are sent with the gradients; on an accelerator when
    the device has finished the step, which may be some steps later, so that the host does not wait. All ranks make the
    same decisions, because they decide from the same times after the same step.
    """

    def __init__(self, rule: ChunkRule | None, ranks: int, device: torch.device, inform: Callable[[str], None]) -> None:
        self.controller = None if rule is None else _make_controller(rule, ranks, inform)
        self.undrawn: dict[ShareTable, Callable[[], int]] = {}  # return the first batch not drawn by any rank
        self.current: tuple[ShareTable, SharedBatch] | None = None  # the batch and the table that has divided it
        self._ranks = ranks
        self._device = device
        self._inform = inform
        self._counted: SharedBatch | None = None  # the last batch that is part of a step
        self._timer: Timer | None = None  # while this rank computes
        self._step = TimedStep()
        self._unsent: deque[tuple[int, list[Timer]]] = deque()
        self._unread: dict[int, TimedStep] = {}  # by number, from 1
        self._timed: deque[TimedStep] = deque(maxlen=_MOST_UNREAD)  # the last ones whose times are known
        self._number = 0

    def begin_batch(self, table: ShareTable, shared: SharedBatch) -> None:
        """Begin with a batch, under Fabric maybe one of evaluation; forget a measurement that was not stopped."""
        table.begun = shared.number + 1
        self.current, self._timer = (table, shared), None

    def count_batch(self, control: StepControl) -> None:
        """Make the current batch part of the step, once, and compare its indices among the ranks."""
        if self.current is not None:
            _, shared = self.current
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
            self._step.timers.append(timer)
        return timer is not None

    def end_step(self) -> None:
        """End the step, the same one on all ranks."""
        self.stop()
        if not self._step.batches:
            return
        self._number += 1
        self._unsent.append((self._number, self._step.timers))
        self._unread[self._number] = self._step
        self._unread.pop(self._number - _MOST_UNREAD, None)
        self._step = TimedStep()

    @contextmanager
    def exchange(
        self, synchronizing: AbstractContextManager[None], control: StepControl, ends_step: bool
    ) -> Iterator[None]:
        """Synchronise gradients at the end of the block; send times with them, and change the shares by the answers."""
        with synchronizing:
            yield
            if ends_step:
                self.end_step()
            control.timed, control.seconds = 0, 0.0
            if self._unsent and all(timer.is_done() for timer in self._unsent[0][1]):
                control.timed, timers = self._unsent.popleft()
                control.seconds = float(sum(timer.seconds for timer in timers))
        exchanged = control.exchanged
        assert exchanged is not None
        self._limit([None if limit < 0 else int(limit) for limit in exchanged.most_samples])
        for rank, (number, seconds) in enumerate(zip(exchanged.timed, exchanged.seconds, strict=True)):
            step = self._unread.get(int(number))
            if step is not None:
                step.seconds[rank] = seconds
                if len(step.seconds) == self._ranks:  # the times have arrived from all ranks
                    self._timed.append(self._unread.pop(int(number)))
                    self._decide(step)

    def _limit(self, limits: list[int | None]) -> None:
        """Limit the shares to the memory of all ranks."""
        controller = self.controller
        if controller is not None and self.current is not None and limits != controller.limits:
            controller.limits = limits
            known = ", ".join(f"{limit} on rank {rank}" for rank, limit in enumerate(limits) if limit is not None)
            self._change(controller, self.current[0], f"samples that fit into the memory: {known}")

    def _decide(self, step: TimedStep) -> None:
        """Let the controller decide by the times of a step."""
        controller, first = self.controller, step.batches[0]
        if controller is None or self.current is None:
            return
        # Batches that were divided before the last change say nothing about it, and a partial batch is no measure.
        if first.number < self.current[0].held_from or any(batch.nominal != first.nominal for batch in step.batches):
            return
        seconds = [step.seconds[rank] / len(step.batches) for rank in sorted(step.seconds)]
        decision = controller.observe(first.nominal, seconds)
        if decision is not None:
            self._change(controller, self.current[0], f"{decision}", decision.before != decision.after)

    def _change(self, controller: BalanceController, table: ShareTable, reason: str, changes: bool = True) -> None:
        self._inform(f'`balance="auto"`, batch {table.begun}: {reason}.')
        for own, undrawn in self.undrawn.items() if changes else ():
            own.change(undrawn(), controller.shares, controller.limits)

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
            self._inform('`balance="auto"` starts with even shares: the checkpoint has another number of ranks.')
            return False
        self.controller.load_state_dict(state)
        return True


def _make_controller(rule: ChunkRule, ranks: int, inform: Callable[[str], None]) -> BalanceController | None:
    if ranks == 1 or not (rule.is_auto or rule.is_free):
        return None
    if are_deterministic():
        if rule.is_auto:
            inform('`balance="auto"` is off and batches are shared evenly: it would not be deterministic.')
        return None
    return BalanceController(ranks, "rank")

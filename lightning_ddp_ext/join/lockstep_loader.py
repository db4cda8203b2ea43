"""The same number of steps on every rank, however much data each rank has."""

import copy
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_warn

from lightning_ddp_ext.distributed.exchange import broadcast_bytes, gather_integer, list_ranks
from lightning_ddp_ext.distributed.serialization import name_skipped, pack, unpack
from lightning_ddp_ext.errors import UnevenInputsError, UnsupportedFeatureError
from lightning_ddp_ext.ranks.loaders import FetchedBatch, StepParticipation

UnevenInputs = Literal["join", "stop", "error"]
_T = TypeVar("_T")


def number_of_steps(lengths: Sequence[float], uneven_inputs: UnevenInputs) -> float:
    """Return the number of steps of all ranks, from their numbers of batches; raise if "error" forbids it."""
    if uneven_inputs == "error" and min(lengths) != max(lengths):
        shortest = lengths.index(min(lengths))
        raise UnevenInputsError(
            f"rank {shortest} runs out of data after batch {min(lengths):.0f}, while rank {lengths.index(max(lengths))}"
            f' has {max(lengths):.0f} batches. Give all ranks equally many, or use `uneven_inputs="join"`.'
        )
    return min(lengths) if uneven_inputs == "stop" else max(lengths)


class HasNextBatch:
    """Exchange among ranks of whether each has a batch for the next step, one step at a time.

    A rank sends 0 if it has none, else a number below 2 ** 53. `receive` takes the numbers of all ranks if they were
    sent with the gradients; otherwise `wait` sends them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.local = 0  # the number of this rank
        self.has_warned = False  # of a loader that ended before its length
        self._group = group
        self._received: list[int] | None = None

    def send(self, number: int) -> None:
        """Set the number of this rank for the next step."""
        self.local, self._received = number, None

    def receive(self, numbers: Iterable[float]) -> None:
        """Take the numbers of all ranks, which were sent with the gradients."""
        self._received = list(map(int, numbers))

    def wait(self) -> list[int]:
        """Return the numbers of all ranks."""
        return gather_integer(self.local, self._group) if self._received is None else self._received

    def ahead(
        self, batches: Iterator[_T], describe: Callable[[_T], int], goes_on: Callable[[list[int], int], bool], step: int
    ) -> Iterator[tuple[list[int], _T | None, bool]]:
        """Yield for each step the numbers of all ranks, this rank's batch or None, and whether it is its last one.

        Each batch is fetched a step ahead, so that its number, which `describe` returns, is sent with the gradients.
        Given the numbers of all ranks, `goes_on` returns False if there is no further step. `step` is the first one.
        """
        following = next(batches, None)
        self.send(0 if following is None else describe(following))
        while goes_on(numbers := self.wait(), step):
            batch, following = following, None if following is None else next(batches, None)
            self.send(0 if following is None else describe(following))
            yield numbers, batch, batch is not None and following is None
            step += 1


class StepMaker:
    """Makes the steps of all ranks: a step has the ranks that have a batch, and a stand-in for every other rank.

    A stand-in is a copy of a batch of this rank, so that hooks see a batch of the right form. A rank that never had a
    batch gets a batch of another rank.
    """

    def __init__(self, group: dist.ProcessGroup, stand_in: list[Any] | None = None) -> None:
        self.stand_in = [] if stand_in is None else stand_in  # with one entry, if there is a stand-in
        self._group = group
        self.rank = dist.get_rank(group)
        self._present: Sequence[int] = ()
        self._participation: StepParticipation | None = None

    def make(
        self, present: Sequence[int], batch: Any, samples: float | None, keeps: bool = False
    ) -> tuple[Any, FetchedBatch]:
        """Return the batch of a step, or a stand-in for it, given which ranks have one. Call on every rank.

        The stand-in of later steps is a copy of this batch if it `keeps` it.
        """
        if keeps:
            self.keep(batch)
        if self._participation is None or present != self._present:
            self._present = present
            active = tuple(rank for rank, has_batch in enumerate(present) if has_batch)
            self._participation = StepParticipation(active, not present[self.rank], not all(present))
            if self._participation.is_uneven:
                self._share_stand_in(active[0], batch)
        if self._participation.is_shadow:
            batch = copy.deepcopy(self.stand_in[0])  # a copy for each step, since hooks may change it
        return batch, FetchedBatch(samples, self._participation, is_stand_in=keeps and bool(self.stand_in))

    def _share_stand_in(self, source: int, batch: Any) -> None:
        """Give joined ranks that have no stand-in the batch of another rank."""
        needed = gather_integer(not self.stand_in and not self._present[self.rank], self._group)
        if not any(needed):
            return
        data = broadcast_bytes(pack(batch).data if self.rank == source else None, self._group, source)
        stand_in, skipped = unpack(data)
        lacking = list_ranks([rank for rank, needs in enumerate(needed) if needs])
        if "" in skipped:
            raise UnsupportedFeatureError(
                f"{lacking} never had a batch that can be copied, and cannot be given one of rank {source}:"
                f" {name_skipped(skipped)} can only be sent by running code on the other side. Give every rank at least"
                " one batch, of tensors without gradients and objects that `copy.deepcopy` copies."
            )
        if not needed[self.rank]:
            return
        if skipped:
            warnings.warn(
                f"rank {self.rank} never had a batch that can be copied, and hooks see one of rank {source} in its"
                f" place, with None instead of {name_skipped(skipped)}, which cannot be sent.",
                category=UserWarning,
                stacklevel=2,
            )
        self.keep(stand_in)

    def keep(self, batch: Any) -> None:
        """Keep a copy of a batch of this rank as the stand-in, if it can be copied."""
        try:
            self.stand_in[:] = [copy.deepcopy(batch)]
        except Exception:  # a user's class may raise anything; the batch of another rank stands in then
            self.stand_in.clear()


@dataclass(eq=False)
class LockstepLoader:
    """Yields the batches of this rank, and stand-ins for them as long as other ranks have batches.

    The stand-in is this rank's last batch, see `StepMaker`. Unless `lengths` are known on every rank and exact, ranks
    agree one batch ahead whether there is another step, see `HasNextBatch`.

    `dropped` is the number of batches of each rank that `uneven_inputs="stop"` drops; without lengths it is known after
    the end, at most 1 for each rank.
    """

    batches: Iterable[tuple[Any, float | None]]
    lengths: Sequence[int] | None
    group: dist.ProcessGroup
    has_next_batch: HasNextBatch
    uneven_inputs: UnevenInputs = "join"
    skip: int = 0  # steps that an interrupted run has made
    is_exact: bool = True  # no loader can have fewer batches than its length

    def __post_init__(self) -> None:
        self._batches = iter(self.batches)
        self._rank = dist.get_rank(self.group)
        self._maker = StepMaker(self.group)
        self.steps: int | None = None  # if known
        self.dropped: list[int] = []
        if self.lengths is not None:
            steps = self.steps = int(number_of_steps(self.lengths, self.uneven_inputs))
            self.dropped = [max(0, length - steps) for length in self.lengths]

    def __iter__(self) -> Iterator[tuple[Any, FetchedBatch]]:
        lengths = self.lengths if self.is_exact else None
        own_skip = self.skip if lengths is None else min(self.skip, lengths[self._rank])
        for batch, _ in deque(itertools.islice(self._batches, own_skip), maxlen=1):
            self._maker.keep(batch)
        return self._iterate_asking() if lengths is None else self._iterate_sized(lengths)

    def _iterate_sized(self, lengths: Sequence[int]) -> Iterator[tuple[Any, FetchedBatch]]:
        assert self.steps is not None
        own = lengths[self._rank]
        for step in range(self.skip, self.steps):
            batch, samples = self._fetch(own, step) if step < own else (None, None)
            is_last = step == own - 1 < self.steps - 1
            yield self._maker.make([length > step for length in lengths], batch, samples, is_last)

    def _iterate_asking(self) -> Iterator[tuple[Any, FetchedBatch]]:
        ahead = self.has_next_batch.ahead(self._batches, lambda _: 1, self._goes_on, self.skip)
        for present, fetched, is_last in ahead:
            batch, samples = fetched or (None, None)
            yield self._maker.make(present, batch, samples, is_last)

    def _goes_on(self, present: Sequence[int], step: int) -> bool:
        announced = self.lengths or ()
        short = [rank for rank, length in enumerate(announced) if step < length and not present[rank]]
        if short and not self.has_next_batch.has_warned:
            self.has_next_batch.has_warned = True
            rank_zero_warn(
                f"{list_ranks(short)}: the loader announced {announced[short[0]]} batches and ended after {step}. The"
                " run continues, since ranks ask each other in every step. Correct the `__len__`: it tells the Trainer"
                " which batch is the last; with `drop_last=True`, each worker drops an incomplete batch."
            )
        if self.uneven_inputs == "join" or all(present) or not any(present):
            return any(present)
        if self.uneven_inputs == "error":
            missing = [rank for rank, has_batch in enumerate(present) if not has_batch]
            raise UnevenInputsError(
                f"{list_ranks(missing)} ran out of data after batch {step}, other ranks have more. Give all ranks"
                ' equally many batches, or use `uneven_inputs="join"`.'
            )
        self.dropped = [*present]
        return False

    def _fetch(self, length: int, step: int) -> tuple[Any, float | None]:
        fetched = next(self._batches, None)
        if fetched is None:
            raise UnevenInputsError(
                f"rank {self._rank}: the loader announced {length} batches and ended after {step}. Do not change its"
                " dataset or sampler within an epoch."
            )
        return fetched

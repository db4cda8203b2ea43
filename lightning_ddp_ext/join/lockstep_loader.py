"""The same number of steps on every rank, however much data each rank has."""

import copy
import itertools
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from lightning_ddp_ext.distributed.exchange import broadcast_bytes, gather_integer, list_ranks
from lightning_ddp_ext.distributed.serialization import name_skipped, pack, unpack
from lightning_ddp_ext.errors import UnevenInputsError, UnsupportedFeatureError
from lightning_ddp_ext.ranks.loaders import FetchedBatch, StepParticipation

UnevenInputs = Literal["join", "stop", "error"]


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

    `receive` takes the flags of all ranks if they were sent with the gradients; otherwise `wait` sends them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.local = False  # the flag of this rank
        self._group = group
        self._received: list[bool] | None = None

    def send(self, has_batch: bool) -> None:
        """Set the flag of this rank for the next step."""
        self.local, self._received = has_batch, None

    def receive(self, flags: Iterable[float]) -> None:
        """Take the flags of all ranks, which were sent with the gradients."""
        self._received = list(map(bool, flags))

    def wait(self) -> list[bool]:
        """Return the flags of all ranks."""
        return list(map(bool, gather_integer(self.local, self._group))) if self._received is None else self._received


class StepMaker:
    """Makes the steps of all ranks: a step has the ranks that have a batch, and a stand-in for every other rank.

    A stand-in is a copy of a batch of this rank, so that hooks see a batch of the right form. A rank that never had a
    batch gets a batch of another rank.
    """

    def __init__(self, group: dist.ProcessGroup, stand_in: list[Any] | None = None) -> None:
        self.stand_in = [] if stand_in is None else stand_in  # with one entry, if there is a stand-in
        self._group = group
        self._rank = dist.get_rank(group)
        self._present: Sequence[bool] = ()
        self._participation: StepParticipation | None = None

    def make(
        self, present: Sequence[bool], batch: Any, samples: float | None, keeps: bool = False
    ) -> tuple[Any, FetchedBatch]:
        """Return the batch of a step, or a stand-in for it, given which ranks have one. Call on every rank.

        The stand-in of later steps is a copy of this batch if it `keeps` it.
        """
        if keeps:
            self.keep(batch)
        if self._participation is None or present != self._present:
            self._present = present
            active = tuple(rank for rank, has_batch in enumerate(present) if has_batch)
            self._participation = StepParticipation(active, not present[self._rank], not all(present))
            if self._participation.is_uneven:
                self._share_stand_in(active[0], batch)
        if self._participation.is_shadow:
            batch = copy.deepcopy(self.stand_in[0])  # a copy for each step, since hooks may change it
        return batch, FetchedBatch(samples, self._participation, is_stand_in=keeps and bool(self.stand_in))

    def _share_stand_in(self, source: int, batch: Any) -> None:
        """Give joined ranks that have no stand-in the batch of another rank."""
        needed = gather_integer(not self.stand_in and not self._present[self._rank], self._group)
        if not any(needed):
            return
        data = broadcast_bytes(pack(batch).data if self._rank == source else None, self._group, source)
        stand_in, skipped = unpack(data)
        lacking = list_ranks([rank for rank, needs in enumerate(needed) if needs])
        if "" in skipped:
            raise UnsupportedFeatureError(
                f"{lacking} never had a batch that can be copied, and cannot be given one of rank {source}:"
                f" {name_skipped(skipped)} can only be sent by running code on the other side. Give every rank at least"
                " one batch, of tensors without gradients and objects that `copy.deepcopy` copies."
            )
        if not needed[self._rank]:
            return
        if skipped:
            warnings.warn(
                f"rank {self._rank} never had a batch that can be copied, and hooks see one of rank {source} in its"
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

    The stand-in is this rank's last batch, see `StepMaker`. Unless `lengths` are known on every rank, ranks agree one
    batch ahead whether there is another step, see `HasNextBatch`.

    `dropped` is the number of batches of each rank that `uneven_inputs="stop"` drops; without lengths it is known after
    the end, at most 1 for each rank.
    """

    batches: Iterable[tuple[Any, float | None]]
    lengths: Sequence[int] | None
    group: dist.ProcessGroup
    has_next_batch: HasNextBatch
    uneven_inputs: UnevenInputs = "join"
    skip: int = 0  # steps that an interrupted run has made

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
        own_skip = self.skip if self.lengths is None else min(self.skip, self.lengths[self._rank])
        for batch, _ in deque(itertools.islice(self._batches, own_skip), maxlen=1):
            self._maker.keep(batch)
        return self._iterate_unsized() if self.lengths is None else self._iterate_sized(self.lengths)

    def _iterate_sized(self, lengths: Sequence[int]) -> Iterator[tuple[Any, FetchedBatch]]:
        assert self.steps is not None
        own = lengths[self._rank]
        for step in range(self.skip, self.steps):
            batch, samples = self._fetch(own, step) if step < own else (None, None)
            is_last = step == own - 1 < self.steps - 1
            yield self._maker.make([length > step for length in lengths], batch, samples, is_last)

    def _iterate_unsized(self) -> Iterator[tuple[Any, FetchedBatch]]:
        following = next(self._batches, None)
        self.has_next_batch.send(following is not None)
        for step in itertools.count(self.skip):
            present = self.has_next_batch.wait()
            if not any(present):
                return
            if self.uneven_inputs != "join" and not all(present):
                self._end_early(present, step)
                return
            (batch, samples), has_batch = following or (None, None), following is not None
            following = next(self._batches, None) if has_batch else None
            self.has_next_batch.send(following is not None)
            yield self._maker.make(present, batch, samples, has_batch and following is None)

    def _end_early(self, present: Sequence[bool], step: int) -> None:
        if self.uneven_inputs == "error":
            missing = [rank for rank, has_batch in enumerate(present) if not has_batch]
            raise UnevenInputsError(
                f"{list_ranks(missing)} ran out of data after batch {step}, other ranks have more. Give all ranks"
                ' equally many batches, or use `uneven_inputs="join"`.'
            )
        self.dropped = [int(has_batch) for has_batch in present]

    def _fetch(self, length: int, step: int) -> tuple[Any, float | None]:
        fetched = next(self._batches, None)
        if fetched is None:
            raise UnevenInputsError(
                f"rank {self._rank}: the loader announced {length} batches and ended after {step}. Correct the"
                " `__len__` of its dataset, or remove it, so that ranks ask each other in every step."
            )
        return fetched

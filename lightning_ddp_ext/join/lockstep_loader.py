"""The same number of steps on every rank, however much data each rank has."""

import copy
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_ddp_ext.distributed.exchange import broadcast_bytes, gather_integer, gather_known, list_ranks
from lightning_ddp_ext.distributed.serialization import name_skipped, pack, unpack
from lightning_ddp_ext.errors import UnevenInputsError, UnsupportedFeatureError
from lightning_ddp_ext.ranks.sample_counts import FetchedBatch, StepParticipation

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

    The flag of a rank is a separate message, sent while the present step runs. If it is sent with the gradients,
    `receive` takes the flags of all ranks; after a step that synchronises no gradients, `wait` sends the message.
    """

    def __init__(self, group: dist.ProcessGroup, is_sent_with_gradients: bool) -> None:
        self.local = False  # the flag of this rank
        self._group = group
        self._is_sent_with_gradients = is_sent_with_gradients
        self._answer: Callable[[], list[bool]] | None = None  # waits for the flags of all ranks; None if not asked yet

    def send(self, has_batch: bool) -> None:
        """Set the flag of this rank for the next step."""
        self.local = has_batch
        self._answer = None if self._is_sent_with_gradients else self._ask()

    def receive(self, flags: Iterable[float]) -> None:
        """Take the flags of all ranks, which were sent with the gradients."""
        received = list(map(bool, flags))
        self._answer = lambda: received

    def wait(self) -> list[bool]:
        """Return the flags of all ranks."""
        return (self._answer or self._ask())()

    def _ask(self) -> Callable[[], list[bool]]:
        """Send the flag of this rank; return a function that waits for all flags."""
        flags = torch.zeros(dist.get_world_size(self._group), dtype=torch.int32)
        flags[dist.get_rank(self._group)] = self.local
        work = dist.all_reduce(flags, group=self._group, async_op=True)

        def wait() -> list[bool]:
            work.wait()
            return list(flags.bool().tolist())

        return wait


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


class LockstepLoader:
    """Yields the batches of this rank, and stand-ins for them as long as other ranks have batches.

    The stand-in is this rank's last batch, see `StepMaker`. Unless `lengths` are known on every rank, ranks agree one
    batch ahead whether there is another step, see `HasNextBatch`.

    `dropped` is the number of batches of each rank that `uneven_inputs="stop"` drops; without lengths it is known after
    the end, at most 1 for each rank, and `dropped_samples` is the number of samples in these batches.
    """

    def __init__(
        self,
        batches: Iterable[tuple[Any, float | None]],
        lengths: Sequence[int] | None,
        group: dist.ProcessGroup,
        has_next_batch: HasNextBatch,
        uneven_inputs: UnevenInputs = "join",
        skip: int = 0,
    ) -> None:
        self._batches = iter(batches)
        self._lengths = lengths
        self._group = group
        self._rank = dist.get_rank(group)
        self._uneven_inputs = uneven_inputs
        self._skip = skip  # steps that an interrupted run has made
        self._has_next_batch = has_next_batch
        self._maker = StepMaker(group)
        self.steps: int | None = None  # if known
        self.dropped: list[int] = []
        self.dropped_samples: int | None = None
        if lengths is not None:
            steps = self.steps = int(number_of_steps(lengths, uneven_inputs))
            self.dropped = [max(0, length - steps) for length in lengths]

    def __iter__(self) -> Iterator[tuple[Any, FetchedBatch]]:
        own_skip = self._skip if self._lengths is None else min(self._skip, self._lengths[self._rank])
        for batch, _ in deque(itertools.islice(self._batches, own_skip), maxlen=1):
            self._maker.keep(batch)
        return self._iterate_unsized() if self._lengths is None else self._iterate_sized(self._lengths)

    def _iterate_sized(self, lengths: Sequence[int]) -> Iterator[tuple[Any, FetchedBatch]]:
        assert self.steps is not None
        own = lengths[self._rank]
        for step in range(self._skip, self.steps):
            batch, samples = self._fetch(own, step) if step < own else (None, None)
            is_last = step == own - 1 < self.steps - 1
            yield self._maker.make([length > step for length in lengths], batch, samples, is_last)

    def _iterate_unsized(self) -> Iterator[tuple[Any, FetchedBatch]]:
        following = next(self._batches, None)
        self._has_next_batch.send(following is not None)
        for step in itertools.count(self._skip):
            present = self._has_next_batch.wait()
            if not any(present):
                return
            if self._uneven_inputs != "join" and not all(present):
                self._end_early(present, step, following)
                return
            (batch, samples), has_batch = following or (None, None), following is not None
            following = next(self._batches, None) if has_batch else None
            self._has_next_batch.send(following is not None)
            yield self._maker.make(present, batch, samples, has_batch and following is None)

    def _end_early(self, present: Sequence[bool], step: int, following: tuple[Any, float | None] | None) -> None:
        if self._uneven_inputs == "error":
            missing = [rank for rank, has_batch in enumerate(present) if not has_batch]
            raise UnevenInputsError(
                f"{list_ranks(missing)} ran out of data after batch {step}, other ranks have more. Give all ranks"
                ' equally many batches, or use `uneven_inputs="join"`.'
            )
        self.dropped = [int(has_batch) for has_batch in present]
        samples = 0 if following is None else following[1]
        (counts,) = gather_known([None if samples is None else int(samples)], self._group)
        self.dropped_samples = None if counts is None else sum(counts)

    def _fetch(self, length: int, step: int) -> tuple[Any, float | None]:
        fetched = next(self._batches, None)
        if fetched is None:
            raise UnevenInputsError(
                f"rank {self._rank}: the loader announced {length} batches and ended after {step}. Correct the"
                " `__len__` of its dataset, or remove it, so that ranks ask each other in every step."
            )
        return fetched

"""The same number of steps on every rank, however much data each has."""

import copy
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_ddp_ext.distributed.exchange import broadcast_bytes, gather_integer, list_ranks
from lightning_ddp_ext.distributed.serialization import name_skipped, pack, unpack
from lightning_ddp_ext.errors import UnevenInputsError, UnsupportedFeatureError
from lightning_ddp_ext.reducer.control import StepControl

UnevenInputs = Literal["join", "stop", "error"]
UNEVEN_INPUTS = ("join", "stop", "error")

_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class StepParticipation:
    """Which ranks have a batch in a step.

    Attributes:
        active: The ranks that have one, in ascending order.
        is_shadow: Whether this rank has none.
        is_uneven: Whether any rank has none.
    """

    active: tuple[int, ...]
    is_shadow: bool
    is_uneven: bool


def gather_lengths(length: int | None, group: dist.ProcessGroup) -> list[int] | None:
    """Return how many batches each rank has; None if any of them does not know. One collective."""
    lengths = gather_integer(_UNKNOWN if length is None else length, group)
    return None if _UNKNOWN in lengths else lengths


def number_of_steps(lengths: Sequence[float], uneven_inputs: UnevenInputs) -> float:
    """Return the number of steps that all ranks make.

    Args:
        lengths: Number of batches of each rank.
        uneven_inputs: Until when steps go on: `"join"` until the last rank has run out, `"stop"` until the first has.

    Raises:
        UnevenInputsError: If the lengths differ, and `uneven_inputs` is `"error"`.
    """
    if uneven_inputs == "error" and min(lengths) != max(lengths):
        shortest = lengths.index(min(lengths))
        raise UnevenInputsError(
            f"rank {shortest} runs out of data after batch {min(lengths):g}, while rank {lengths.index(max(lengths))}"
            f' has {max(lengths):g} batches. Give all ranks equally many, or use `uneven_inputs="join"`.'
        )
    return min(lengths) if uneven_inputs == "stop" else max(lengths)


class HasNextBatch:
    """Exchange among ranks of whether each has a batch for the next step, one step at a time.

    Without a `control`, the flag of a rank is a separate message, sent while the present step runs. With one, the flag
    is sent with the gradients, and `receive` takes the flags of all ranks; after a step that synchronises no gradients,
    `wait` sends the message.
    """

    def __init__(self, group: dist.ProcessGroup, control: StepControl | None = None) -> None:
        self.local = False  # the flag of this rank
        self._group = group
        self._control = control
        self._message: tuple[torch.Tensor, Any] | None = None
        self._flags: list[bool] | None = None

    def send(self, has_batch: bool) -> None:
        """Set the flag of this rank for the next step."""
        self.local = has_batch
        self._flags = self._message = None
        if self._control is None:
            self._message = self._start_message()
        else:
            self._control.has_next_batch = has_batch

    def receive(self, flags: Iterable[float]) -> None:
        """Take the flags of all ranks, which were sent with the gradients."""
        self._flags = list(map(bool, flags))

    def wait(self) -> list[bool]:
        """Return the flags of all ranks."""
        if self._flags is None:
            flags, work = self._message or self._start_message()
            work.wait()
            self._flags = flags.bool().tolist()
        return self._flags

    def _start_message(self) -> tuple[torch.Tensor, Any]:
        flags = torch.zeros(dist.get_world_size(self._group), dtype=torch.int32)
        flags[dist.get_rank(self._group)] = self.local
        return flags, dist.all_reduce(flags, group=self._group, async_op=True)


class LockstepLoader:
    """Iterates over a source, and goes on with batches that do not count while other ranks still have some.

    Yields pairs of a batch and a `StepParticipation`.
    On a shadow step the batch is a copy of the last one that the rank had, so that
    hooks see something of the right form; a rank that never had any gets the first batch of another rank, as far as it
    can be sent without running code, see `serialization.pack`.

    Where every rank knows its length, no vote is needed. Otherwise ranks vote on whether there is another step, one
    batch ahead, see `HasNextBatch`.

    Args:
        source: Makes the batches of this rank, each time it is iterated over.
        lengths: Number of batches of each rank, None if that is not known.
        group: The ranks, over a backend that has CPU tensors.
        uneven_inputs: See `number_of_steps`.
        limit: Number of steps after which to stop in any case.
        skip: Steps that have been made before, in the run that this one resumes.
        has_next_batch: How ranks vote; by default each time with a message.
        count: Returns how many samples the source has drawn for the batch it has just yielded; None if not known.

    Attributes:
        length: Number of steps, if it is known, before the first one.
        samples: Number of samples drawn for the batch that was yielded last; None if that is not known.
        left_out: How many batches of each rank `uneven_inputs="stop"` leaves out. Where lengths are not known, it is
            known after the end, and at least that many.
        left_out_samples: How many samples these are, where lengths are not known and the source has drawn them.

    Raises:
        UnevenInputsError: While iterating, if ranks run out of data at different times and that is refused, or if the
            source yields fewer batches than were announced.
        UnsupportedFeatureError: While iterating, on every rank, if a rank that never had a batch that can be copied
            cannot be given one.
    """

    def __init__(
        self,
        source: Iterable[Any],
        lengths: Sequence[int] | None,
        group: dist.ProcessGroup,
        uneven_inputs: UnevenInputs = "join",
        limit: float = float("inf"),
        skip: int = 0,
        has_next_batch: HasNextBatch | None = None,
        count: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._source = source
        self._lengths = lengths
        self._group = group
        self._rank = dist.get_rank(group)
        self._has_next_batch = has_next_batch or HasNextBatch(group)
        self._uneven_inputs = uneven_inputs
        self._limit = limit
        self._skip = skip
        self._present: Sequence[bool] = ()
        self._participation: StepParticipation | None = None
        self._filler: Any = None
        self._has_filler = False
        self._count = count
        self.samples: float | None = None
        self.length: int | None = None
        self.left_out: list[int] = []
        self.left_out_samples: int | None = None

    def __iter__(self) -> Iterator[tuple[Any, StepParticipation]]:
        self.left_out = []
        self._participation = None
        yield from self._iterate_unsized() if self._lengths is None else self._iterate_sized(self._lengths)

    def _iterate_sized(self, lengths: Sequence[int]) -> Iterator[tuple[Any, StepParticipation]]:
        own = lengths[self._rank]
        self.length = steps = int(min(self._limit, number_of_steps(lengths, self._uneven_inputs)))
        if self._uneven_inputs == "stop":
            self.left_out = [int(max(0, min(self._limit, length) - steps)) for length in lengths]
        batches = iter(self._source)
        self._pass_over(batches, min(self._skip, own))
        step = self._skip
        present = [length > step for length in lengths]
        while step < steps:
            if step in lengths:
                present = [length > step for length in lengths]
            batch = self._fetch(batches, own, step) if step < own else None
            self.samples = self._count() if step < own else None
            if step == own - 1 < steps - 1:
                self._keep(batch)
            yield self._make_step(present, batch)
            step += 1

    def _iterate_unsized(self) -> Iterator[tuple[Any, StepParticipation]]:
        batches = iter(self._source)
        self._pass_over(batches, self._skip)
        step = self._skip
        has_batch, batch = _advance(batches)
        samples = self._count()
        self._has_next_batch.send(has_batch)
        while any(present := self._has_next_batch.wait()) and step < self._limit:
            if self._uneven_inputs != "join" and not all(present):
                self._end_early(present, step, samples)
                return
            given, self.samples = batch, samples
            if has_batch:
                has_batch, batch = _advance(batches)
                samples = self._count()
                if not has_batch:
                    self._keep(given)
            self._has_next_batch.send(has_batch)
            yield self._make_step(present, given)
            step += 1

    def _make_step(self, present: Sequence[bool], batch: Any) -> tuple[Any, StepParticipation]:
        if self._participation is None or present != self._present:
            self._present = present
            active = tuple(rank for rank, has_batch in enumerate(present) if has_batch)
            self._participation = StepParticipation(active, not present[self._rank], not all(present))
            if self._participation.is_uneven:
                self._share_filler(active[0], batch)
        # Each time another copy: hooks may change it.
        return (copy.deepcopy(self._filler) if self._participation.is_shadow else batch), self._participation

    def _share_filler(self, source: int, batch: Any) -> None:
        """Give ranks that have never had a batch, or none that can be copied, one of another rank."""
        needed = gather_integer(not self._has_filler and not self._present[self._rank], self._group)
        if not any(needed):
            return
        data = broadcast_bytes(pack(batch).data if self._rank == source else None, self._group, source)
        filler, skipped = unpack(data)
        lacking = list_ranks([rank for rank, needs in enumerate(needed) if needs])
        if "" in skipped:
            raise UnsupportedFeatureError(
                f"{lacking} never had a batch that can be copied, and cannot be given one of rank {source}:"
                f" {name_skipped(skipped)} can only be sent by running code on the other side. Give every rank at least"
                " one batch, of tensors without gradients and what `copy.deepcopy` copies."
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
        self._keep(filler)

    def _keep(self, batch: Any) -> None:
        """Keep a copy of the last batch, to stand in for those that are missing, if it can be copied."""
        try:
            self._filler, self._has_filler = copy.deepcopy(batch), True
        except Exception:  # whatever users' classes raise: such a batch can be trained on, and another one stands in
            self._filler, self._has_filler = None, False

    def _end_early(self, present: Sequence[bool], step: int, drawn: float | None) -> None:
        missing = [rank for rank, has_batch in enumerate(present) if not has_batch]
        if self._uneven_inputs == "error":
            raise UnevenInputsError(
                f"{list_ranks(missing)} ran out of data after batch {step}, other ranks have more. Give all ranks"
                ' equally many batches, or use `uneven_inputs="join"`.'
            )
        self.left_out = [int(has_batch) for has_batch in present]
        if not present[self._rank]:
            drawn = 0
        samples = gather_lengths(None if drawn is None else int(drawn), self._group)
        self.left_out_samples = None if samples is None else sum(samples)

    def _fetch(self, batches: Iterator[Any], length: int, step: int) -> Any:
        has_batch, batch = _advance(batches)
        if not has_batch:
            raise UnevenInputsError(
                f"rank {self._rank}: the loader announced {length} batches and ended after {step}. Correct the"
                " `__len__` of its dataset, or remove it, so that ranks ask each other in every step."
            )
        return batch

    def _pass_over(self, batches: Iterator[Any], number: int) -> None:
        """Skip batches; the last one may have to stand in for those that are missing."""
        passed = deque(itertools.islice(batches, number), maxlen=1)
        if passed:
            self._keep(passed[0])


def _advance(batches: Iterator[Any]) -> tuple[bool, Any]:
    try:
        return True, next(batches)
    except StopIteration:
        return False, None

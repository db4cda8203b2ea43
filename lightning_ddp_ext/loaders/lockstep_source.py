"""The same number of steps on every rank, however much data each rank has."""

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loaders import combination_mode, has_exact_length
from lightning_ddp_ext._lightning import rank_zero_warn, sized_len
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext.distributed.exchange import broadcast_bytes, gather_integer, gather_known, list_ranks
from lightning_ddp_ext.distributed.serialization import name_skipped, pack, unpack
from lightning_ddp_ext.errors import UnevenInputsError, UnsupportedFeatureError
from lightning_ddp_ext.loaders.counting import CountedBatches, Fetched
from lightning_ddp_ext.loaders.step_loader import (
    UNLIMITED,
    FetchedBatch,
    Participation,
    StepLoader,
    Steps,
    StepSource,
    combine_part,
    combined_lengths,
    limit_of,
)

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


class RankedLoader:
    """A loader, also for `isinstance`, whose length is the largest number of batches of any rank.

    Its constructor communicates, unless there is a single rank and thus no group. `lengths` and `samples` have a number
    for each rank, or are None if any rank does not know its number.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup | None = None) -> None:
        self.__dict__.update(loader=loader)
        self.exchange(group)

    def exchange(self, group: dist.ProcessGroup | None) -> None:
        """Exchange the lengths of all ranks once more, because a dataset may grow or shrink. Communicates as above."""
        loader = self.loader
        batch_size = getattr(loader, "batch_size", None)
        known = (
            sized_len(loader),
            None if batch_size is None else sized_len(getattr(loader, "sampler", None)),
            batch_size,
            1 if has_exact_length(loader) else None,
        )
        alone = [None if number is None else [number] for number in known]
        # All numbers in one message; a rank that does not know one still takes part.
        lengths, samples, batch_sizes, exact = alone if group is None else gather_known(known, group)
        is_exact = lengths is not None and exact is not None
        self.__dict__.update(lengths=lengths, samples=samples, batch_sizes=batch_sizes, is_exact=is_exact)
        self.__dict__.setdefault("first_lengths", lengths)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__.get("loader", self))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        if self.lengths is None:
            raise TypeError("the number of batches is not known on every rank")
        return int(max(self.lengths))

    def __getattr__(self, name: str) -> Any:
        if "loader" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.__dict__["loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.loader, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.loader, name)


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
        """Yield for each step the numbers of all ranks, this rank's batch or None, and whether that is its last batch.

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


class StandInMaker:
    """Makes the steps of all ranks: a step has the ranks that have a batch, and a stand-in for every other rank.

    A stand-in is a copy of a batch of this rank, so that hooks see a batch of the right form. A rank that never had a
    batch gets a batch of another rank.
    """

    def __init__(self, group: dist.ProcessGroup, stand_in: list[Any] | None = None) -> None:
        self.stand_in = [] if stand_in is None else stand_in  # with one entry, if there is a stand-in
        self._group = group
        self.rank = dist.get_rank(group)
        self._present: Sequence[int] = ()
        self._participation: Participation | None = None

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
            self._participation = Participation(active, not present[self.rank], not all(present))
            if self._participation.is_uneven and self._share_stand_in(active[0], batch):
                keeps = True
        if self._participation.is_shadow:
            batch = copy.deepcopy(self.stand_in[0])  # a copy for each step, since hooks may change it
        return batch, FetchedBatch(samples, self._participation, is_stand_in=keeps and bool(self.stand_in))

    def _share_stand_in(self, source: int, batch: Any) -> bool:
        """Give joined ranks that have no stand-in the batch of another rank; return True on these."""
        # Ranks ask first, since a batch may be large; all ranks know `present` and so come here in the same step.
        needed = gather_integer(not self.stand_in and not self._present[self.rank], self._group)
        if not any(needed):
            return False
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
            return False
        if skipped:
            warnings.warn(
                f"rank {self.rank} never had a batch that can be copied, and hooks see one of rank {source} in its"
                f" place, with None instead of {name_skipped(skipped)}, which cannot be sent.",
                category=UserWarning,
                stacklevel=2,
            )
        self.keep(stand_in)
        return True

    def keep(self, batch: Any) -> None:
        """Keep a copy of a batch of this rank as the stand-in, if it can be copied."""
        try:
            self.stand_in[:] = [copy.deepcopy(batch)]
        except Exception:  # a user's class may raise anything; the batch of another rank stands in then
            self.stand_in.clear()


@dataclass(eq=False)
class LockstepBatches:
    """Yields the batches of this rank, and stand-ins for them as long as other ranks have batches.

    The stand-in is this rank's last batch, see `StandInMaker`. Unless `lengths` are known and exact on all ranks, ranks
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
        self._maker = StandInMaker(self.group)
        self.steps: int | None = None  # if known
        self.dropped: list[int] = []
        if self.lengths is not None:
            steps = self.steps = int(number_of_steps(self.lengths, self.uneven_inputs))
            self.dropped = [max(0, length - steps) for length in self.lengths]

    def __iter__(self) -> Iterator[tuple[Any, FetchedBatch]]:
        lengths = self.lengths if self.is_exact else None
        own_skip = self.skip if lengths is None else min(self.skip, lengths[self._rank])
        for batch, _ in deque(islice(self._batches, own_skip), maxlen=1):
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
            batch, record = self._maker.make(present, batch, samples, is_last)
            yield batch, record._replace(has_next_batch=self.has_next_batch)

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


class LockstepSource(StepSource):
    """Steps of ranks with different batches, any number on each.

    A rank runs out of data when its own `CombinedLoader` would end. In mode "sequential" all ranks use the same loader
    at any time.

    Each rank of a resumed run skips the batches it has used, so an epoch is resumed on as many ranks as before.
    """

    def __init__(
        self, group: dist.ProcessGroup, uneven_inputs: UnevenInputs, has_next_batch: HasNextBatch | None = None
    ) -> None:
        self._group = group
        self._rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._uneven_inputs = uneven_inputs
        self._has_next_batch = has_next_batch  # None for a new one in each epoch
        self._is_first = True
        self._has_reported = False

    @override
    def prepare(self, loader: StepLoader) -> None:
        loader.flattened = [RankedLoader(one, self._group) for one in loader.flattened]
        self.numbers_of_steps(loader)  # raises if they are uneven and must not be

    @override
    def numbers_of_steps(self, loader: StepLoader) -> list[float]:
        return [number_of_steps(numbers, self._uneven_inputs) for numbers in self._numbers_of_batches(loader)]

    def _numbers_of_batches(self, loader: StepLoader) -> list[tuple[float, ...]]:
        """Return the number of batches of each rank: for each loader in mode "sequential", else for all together."""
        lengths = [one.lengths or [None] * self.world_size for one in _ranked(loader)]
        of_ranks = [combined_lengths(loader, of_rank) for of_rank in zip(*lengths, strict=True)]
        return [*zip(*of_ranks, strict=True)]

    @override
    def steps(self, loader: StepLoader, skip: int) -> Steps:
        is_first, self._is_first = self._is_first, False
        if not is_first:  # loaders were prepared just before the first epoch
            self._exchange_lengths(loader)  # now, since Lightning asks for the length next
        return self._iterate(loader, skip, is_first or loader.rng is None)

    def _exchange_lengths(self, loader: StepLoader) -> None:
        for one in loader.flattened:
            if type(one) is RankedLoader:
                one.exchange(self._group)
                if loader.rng is not None and max(one.lengths or [0]) > max(one.first_lengths or [UNLIMITED]):
                    rank_zero_warn(
                        f"a loader has {max(one.lengths)} batches now, and had {max(one.first_lengths)} when the"
                        " Trainer asked, which uses no more. Pass it `reload_dataloaders_every_n_epochs=1`."
                    )

    def _iterate(self, loader: StepLoader, skip: int, has_run_hooks: bool) -> Steps:
        """Yield the steps of an epoch; hooks that have run since `steps` may have changed a dataset."""
        if has_run_hooks:
            self._exchange_lengths(loader)
            loader.length = sized_len(loader)
        ranked = _ranked(loader)
        parts = [[one] for one in ranked] if combination_mode(loader) == "sequential" else [ranked]
        for dataloader_idx, (part, numbers) in enumerate(zip(parts, self._numbers_of_batches(loader), strict=True)):
            has_lengths = all(one.lengths is not None for one in part)
            is_exact = all(one.is_exact for one in part)
            own = numbers[self._rank]
            # A rank skips no more batches than it has.
            own_skip = int(min(skip, own)) if is_exact else skip
            lockstep = LockstepBatches(
                _fetch(loader, part, own_skip, limit_of(loader, own), looks_ahead=not is_exact),
                [int(number) for number in numbers] if has_lengths else None,
                self._group,
                self._has_next_batch or HasNextBatch(self._group),
                self._uneven_inputs,
                skip,
                is_exact,
            )
            self._report_dropped(loader, lockstep)
            for batch_idx, (batch, fetched) in enumerate(lockstep, skip):
                yield (batch, batch_idx, dataloader_idx), fetched
            self._report_dropped(loader, lockstep)

    def _samples_in(self, loader: StepLoader, batches: Sequence[int]) -> list[int] | None:
        """Return the number of samples in the first batches of each rank; None for several loaders, or if unknown."""
        ranked = _ranked(loader)
        if len(ranked) > 1 or ranked[0].samples is None or ranked[0].batch_sizes is None:
            return None
        of_ranks = zip(ranked[0].samples, ranked[0].batch_sizes, batches, strict=True)
        return [min(samples, number * batch_size) for samples, batch_size, number in of_ranks]

    def _report_dropped(self, loader: StepLoader, lockstep: LockstepBatches) -> None:
        dropped, steps = lockstep.dropped, lockstep.steps
        if self._has_reported or not any(dropped):
            return
        self._has_reported = True
        counts = {f"rank {rank}": number for rank, number in enumerate(dropped) if number}
        parts = [f"{number} batch{'es' if number > 1 else ''} of {rank}" for rank, number in counts.items()]
        if steps is None:  # other ranks may have more than one batch when a rank reaches the end of its stream
            rank_zero_info(f'`uneven_inputs="stop"` drops at least {", ".join(parts)}.')
            return
        kept = self._samples_in(loader, [steps] * self.world_size)
        given = self._samples_in(loader, [steps + one for one in dropped])
        if kept is not None and given is not None:
            samples = sum(given) - sum(kept)
            parts.append(f"{samples} sample{'s' if samples > 1 else ''}")
        rank_zero_info(f'`uneven_inputs="stop"` drops {", ".join(parts)} in every epoch.')

    @override
    def check_ranks(self, ranks: int) -> None:
        raise UnsupportedFeatureError(
            f"the checkpoint was saved by {ranks} ranks in the middle of an epoch, and {self.world_size} resume"
            f" it, but each rank skips the batches that it has used itself. Resume on {ranks} ranks, or from a"
            " checkpoint of the end of an epoch; `balanced_ddp` continues an epoch on any number of ranks."
        )


def _ranked(loader: StepLoader) -> list[RankedLoader]:
    # A single rank keeps the user's loaders, so that `trainer.train_dataloader` returns them.
    return [one if type(one) is RankedLoader else RankedLoader(one) for one in loader.flattened]


def _fetch(
    loader: StepLoader, part: list[RankedLoader], skip: int, limit: int | None, looks_ahead: bool
) -> Iterator[tuple[Any, float | None]]:
    """Yield the batches of this rank with their numbers of samples; loaders begin when the first one is needed."""
    if limit == 0:
        return
    combined = combine_part(loader, [one.loader for one in part])
    fetched: Iterable[Fetched] = CountedBatches(combined, loader.prefetcher, limit)
    if loader.rng is not None:
        fetched = loader.rng.iterate(fetched, loader.flattened, skip, looks_ahead)
    for (batch, _, _), samples in islice(fetched, limit):
        yield batch, samples

"""Batch samplers that draw the same global batches on all ranks, and yield the share of this rank."""

import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_ddp_ext.batches.containers import walk
from lightning_ddp_ext.distributed.exchange import broadcast_object, gather_integers
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.join.predictions import as_indices, find_different_rank, hash_of
from lightning_ddp_ext.ranks.sample_counts import count_drawn
from lightning_ddp_ext.resume.rng_state import capture_states, find_loader_rngs, restore_states
from lightning_ddp_ext.shares.costs import SampleCost, measure_costs
from lightning_ddp_ext.shares.table import DividedBatch, Division, SharedBatch, ShareTable

# These draw from the generators of the process before their first index only.
_DRAWING_ONCE = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)

_MOST_COMPARED = 1000  # values and containers of a batch


class SamplingRng:
    """Random numbers of one iteration of a sampler: the same on all ranks, and independent of all other draws."""

    def __init__(self, *seeds: int) -> None:
        words = numpy.random.SeedSequence([seed % 2**64 for seed in seeds]).generate_state(2, numpy.uint64)
        self._seed = int(words[0]) % 2**63
        self._states: Any = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw these numbers from the generators of Python, NumPy and torch in a block."""
        states = self._capture()
        if self._states is None:
            random.seed(self._seed)
            numpy.random.seed(self._seed % 2**32)
            torch.default_generator.manual_seed(self._seed)
        else:
            self._restore(self._states)
        try:
            yield
        finally:
            self._states = self._capture()
            self._restore(states)

    @staticmethod
    def _capture() -> Any:
        return random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()

    @staticmethod
    def _restore(states: Any) -> None:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


class GlobalBatches:
    """What the iterations of one loader need: the shares, the numbers of the batches, and random numbers.

    A loop sets `begin` before an iteration; `fetched` has an entry for each batch that a loader has drawn and the loop
    has not taken yet. A loader begins again within an iteration if it is cycled.
    """

    def __init__(self, table: ShareTable, group: dist.ProcessGroup, is_training: bool) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.fetched: deque[SharedBatch] = deque()
        self.own_indices: list[Any] = []  # in evaluation, of this rank's shares
        self.table = table
        self._is_training = is_training
        self._seeds: tuple[int, ...] = ()
        self._cycles = 0
        self.drawn = 0  # number of the batch that is drawn next
        self.cost = table.cost if is_training else None  # of a sample

    def begin(self, number: int, *seeds: int) -> None:
        """Begin an iteration with the batch of this number; `seeds` are the same on all ranks."""
        self.fetched.clear()
        self.own_indices.clear()
        self.drawn, self._seeds, self._cycles = number, seeds, 0

    def rng(self) -> SamplingRng:
        """Return the random numbers of the next cycle."""
        self._cycles += 1
        return SamplingRng(*self._seeds, self._cycles)

    def draw(self) -> tuple[int, Division]:
        """Return the number of the next batch, and how it is divided."""
        number = self.drawn
        self.drawn += self._is_training  # in evaluation, all batches are divided alike
        return number, self.table.division(number, self._is_training)

    def share(self, batch_size: int, content: int, costs: Sequence[float] | None = None) -> DividedBatch:
        """Divide the next batch, whose content has this hash."""
        number, division = self.draw()
        divided = division.divide(batch_size, costs)
        self.fetched.append(SharedBatch(self.table, number, divided.sizes, content, divided.nominal))
        return divided

    def keep_indices(self, indices: Any) -> None:
        """Keep the indices of this rank's share of a batch of evaluation, for callbacks that write predictions."""
        if not self._is_training:
            self.own_indices.append(as_indices(indices))


class SharedSampler:
    """Draws the indices of global batches alike on every rank, and yields the part of each that this rank fetches.

    The part may be empty. Without `is_cut` all of it is yielded, for loaders whose batches are cut after they have been
    fetched. Generators that are attributes of the samplers begin in the state of rank 0, and all other random numbers
    come from `GlobalBatches.rng`, so any sampler draws alike on all ranks.
    """

    def __init__(self, sampler: Iterable[Any], batches: GlobalBatches, dataset: object, is_cut: bool) -> None:
        self.sampler = sampler  # a name by which generators are found, and Lightning's `set_epoch`
        self._batches = batches
        self._dataset = dataset
        self._is_cut = is_cut
        self._costs: list[float] | None = None  # of all samples of the dataset

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        rng = self._batches.rng()
        if self._batches.cost is not None and self._costs is None:
            with SamplingRng().drawing():
                self._costs = measure_costs(self._dataset, self._batches.cost, self._batches.group)
        self._agree_on_generators()
        with rng.drawing():
            drawn = iter(self.sampler)
            indices = next(drawn, None)
        self._compare(indices)
        draws_once = _draws_once(self.sampler)
        while indices is not None:
            if self._is_cut:
                indices = _as_sequence(indices)
                costs = None if self._costs is None else self._costs_of(indices)
                divided = self._batches.share(len(indices), hash_of(indices), costs)
                indices = divided.own(indices, self._batches.rank)
                self._batches.keep_indices(indices)
            yield indices
            if draws_once:
                indices = next(drawn, None)
            else:
                with rng.drawing():
                    indices = next(drawn, None)

    def _costs_of(self, indices: Any) -> list[float]:
        assert self._costs is not None
        try:
            return [self._costs[index] for index in indices]
        except (TypeError, IndexError) as error:
            raise UnsupportedFeatureError(
                f"`cost` needs a dataset whose samples have the indices 0 to `len(dataset) - 1`, and"
                f" `{type(self.sampler).__name__}` yields {list(indices)[:3]}. Leave `cost` out."
            ) from error

    def _agree_on_generators(self) -> None:
        """Give the generators of the samplers the state that they have on rank 0."""
        generators = find_loader_rngs([self.sampler], excluded=[self._dataset])
        states = capture_states(generators)
        rows = gather_integers([hash_of(states), len(generators)], self._batches.group)
        if any(row != rows[0] for row in rows) and all(row[1] for row in rows):
            restore_states(generators, broadcast_object(states, self._batches.group, 0))

    def _compare(self, first: Any) -> None:
        """Raise an error on all ranks if they have drawn different first batches."""
        different = find_different_rank(first, self._batches.group)
        if different is not None:
            raise UnsupportedFeatureError(
                f"rank {different}: the indices of the first batch, from `{type(self.sampler).__name__}`, are not"
                " those of rank 0. Under `balanced_ddp` every rank has to draw the whole batch: use a sampler that does"
                " not depend on the rank, or `ddp_join` for ranks with samples of their own."
            )


def _as_sequence(indices: Any) -> Any:
    """Return the indices of a batch as something to slice."""
    if isinstance(indices, list | tuple | torch.Tensor | numpy.ndarray):
        return indices
    if isinstance(indices, Iterable) and not isinstance(indices, Mapping | str):
        return list(indices)
    raise UnsupportedFeatureError(
        f"the batch sampler yields `{type(indices).__name__}`, which ranks cannot share. Yield a list of indices."
    )


def _draws_once(sampler: object) -> bool:
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return type(inner) in _DRAWING_ONCE


def hash_of_content(batch: Any, most_dimensions: int) -> int:
    """Return a hash of the first integers and texts in a batch, or of its other numbers if it has none of these.

    Ranks may transform a sample with other random numbers, which changes neither labels nor keys. So arrays of more
    dimensions, such as images and their masks, are skipped. So are objects that are no containers. The hash of nothing
    is 0.
    """
    hashes, kinds = [0, 0], set[bool]()
    for part in islice(walk(batch), _MOST_COMPARED):
        if isinstance(part, Tensor):
            is_comparable = part.device.type == "cpu" and part.layout == torch.strided and not part.is_nested
            if not is_comparable or part.dim() > most_dimensions or part.is_complex() or part.is_quantized:
                continue
            is_float, content = part.is_floating_point(), part.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(part, numpy.ndarray | numpy.generic):
            if part.ndim > most_dimensions or part.dtype.kind not in "biuSUf":
                continue
            is_float, content = part.dtype.kind == "f", part.tobytes()
        elif isinstance(part, int | float | str | bytes):
            is_float, content = isinstance(part, float), repr(part).encode()
        else:
            continue
        kinds.add(is_float)
        hashes[is_float] = zlib.crc32(content, hashes[is_float])
    return hashes[kinds == {True}]


class NoSamples:
    """The batch of a rank that has no sample of a global batch."""


class ShareCollate:
    """Collates the samples of this rank, if there are any; picklable if the function is."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        """Collate samples."""
        if not isinstance(samples, list) or any(one is not None for one in samples):
            return self._collate(samples)
        if not samples:
            return NoSamples()
        try:
            return self._collate(samples)
        except Exception as error:
            raise UnsupportedFeatureError(
                f"all {len(samples)} samples in the share of a rank are None, and the collate function raises"
                f" {type(error).__name__}: {error}. Return a sample for every index, or use larger batches."
            ) from error


class SharedStreamBatch(NamedTuple):
    """A batch of a stream on this rank, as it comes from a worker: only there its number of samples is known."""

    batch: Any  # or `NoSamples`
    number: int
    samples: int | None  # of this rank, without missing ones; None if they cannot be counted
    content: int  # hash of all samples
    sizes: Sequence[int]
    nominal: Sequence[int]


class StreamIndices(list[None]):
    """The indices of a batch of a stream: as many as samples, and the division of the batch.

    torch's fetcher passes no more than the samples to the collate function, but iterates over the indices before.
    """

    number: int
    division: Division

    def __iter__(self) -> Iterator[None]:
        global _fetching
        _fetching = self
        return super().__iter__()


_fetching: StreamIndices  # in the process that fetches


class StreamSampler:
    """Yields the indices of a stream's batches, each with its division."""

    def __init__(self, batch_sampler: Iterable[Any], batches: GlobalBatches) -> None:
        self.batch_sampler = batch_sampler
        self._batches = batches

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[StreamIndices]:
        for indices in self.batch_sampler:
            drawn = StreamIndices(indices)
            drawn.number, drawn.division = self._batches.draw()
            yield drawn


class StreamCollate:
    """Collates the samples of this rank, out of all samples of a batch of a stream."""

    def __init__(self, collate: Callable[[Any], Any], rank: int, cost: SampleCost | None) -> None:
        self._collate = ShareCollate(collate)
        self._rank = rank
        self._cost = cost

    def __call__(self, samples: list[Any]) -> SharedStreamBatch:
        """Collate the share of this rank."""
        place = f"rank {self._rank}, batch {_fetching.number}, sample"
        cost = self._cost
        costs = None if cost is None else [cost(one, f"{place} {index}") for index, one in enumerate(samples)]
        divided = _fetching.division.divide(len(samples), costs)
        own = divided.own(samples, self._rank)
        batch = self._collate(own)
        counted = count_drawn(own, batch, None) if own else 0
        content = hash_of_content(samples, most_dimensions=1)
        return SharedStreamBatch(batch, _fetching.number, counted, content, divided.sizes, divided.nominal)

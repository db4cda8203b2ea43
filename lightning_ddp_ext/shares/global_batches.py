"""Batch samplers that draw the same global batches on all ranks, and yield the share of this rank."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lightning_ddp_ext._compat.lightning_loaders import has_exact_length
from lightning_ddp_ext._lightning import sized_len
from lightning_ddp_ext.batches.sample_counts import as_indices, hash_of
from lightning_ddp_ext.distributed.exchange import broadcast_object, gather_integers, list_ranks
from lightning_ddp_ext.errors import (
    DDPExtError,
    RanksOutOfStepError,
    UnevenInputsError,
    UnsupportedFeatureError,
    text_of,
)
from lightning_ddp_ext.resume.rng_state import SeededRng, capture_states, find_loader_rngs, restore_states
from lightning_ddp_ext.shares.costs import measure_costs
from lightning_ddp_ext.shares.share_table import DividedBatch, Division, SharedBatch, ShareTable

REMEDY = (
    "Under `balanced_ddp` every rank reads all samples: use a dataset and a sampler that do not depend on the rank, or"
    " `ddp_join` if each rank has samples of its own."
)


class GlobalBatches:
    """State of the iterations over one loader: the shares, the numbers of the batches, and random numbers.

    A loop sets `begin` before an iteration; `fetched` has an entry for each batch that a loader has drawn and the loop
    has not taken yet. A loader begins again within an iteration if it is cycled.
    """

    def __init__(self, table: ShareTable, group: dist.ProcessGroup, is_training: bool, loader: object) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.fetched: deque[SharedBatch] = deque()
        self.own_indices: list[Any] = []  # in evaluation, of this rank's shares, for callbacks that write predictions
        self.table = table
        self.is_training = is_training
        # Ranks compare batches one step ahead, if not even the length shows that they draw equally many.
        self.asks = not (isinstance(loader, DataLoader) and has_exact_length(loader))
        self._seeds: tuple[int, ...] = ()
        self._cycles = 0
        self.drawn = 0  # number of the batch that is drawn next
        self.cost = table.cost if is_training else None  # of a sample

    def begin(self, number: int, *seeds: int) -> None:
        """Begin an iteration with the batch of this number; `seeds` are the same on all ranks."""
        self.fetched.clear()
        self.own_indices.clear()
        self.drawn, self._seeds, self._cycles = number, seeds, 0

    def rng(self) -> SeededRng:
        """Return the random numbers of the next cycle."""
        self._cycles += 1
        sequence = numpy.random.SeedSequence([seed % 2**64 for seed in (*self._seeds, self._cycles)])
        return SeededRng(int(sequence.generate_state(1, numpy.uint64)[0]) % 2**63)

    def compare_first(self, first: Any, sampler: Any) -> None:
        """Raise an error on all ranks if a batch sampler gives them other first batches, or other numbers of samples.

        Numbers are compared now, because a rank without a sample of the last batch would communicate alone.
        """
        number = 0 if self.asks else sized_len(getattr(sampler, "sampler", sampler)) or 0
        rows = gather_integers([hash_of(first), number], self.group)
        for which, numbers in zip(("first", "last"), zip(*rows, strict=True), strict=True):
            check_alike(numbers, f"the {which} batch of `{type(sampler).__name__}`")

    def draw(self) -> tuple[int, Division]:
        """Return the number of the next batch, and how it is divided."""
        number = self.drawn
        self.drawn += self.is_training  # in evaluation, all batches are divided alike
        return number, self.table.division(number, self.is_training)

    def share(self, batch_size: int, content: int, costs: Sequence[float] | None = None) -> DividedBatch:
        """Divide the next batch, whose content has this hash."""
        number, division = self.draw()
        divided = division.divide(batch_size, costs)
        self.fetched.append(SharedBatch(self.table, number, divided.sizes, content, divided.nominal))
        return divided


def check_alike(numbers: Sequence[int], batch: str, kind: type[DDPExtError] = UnsupportedFeatureError) -> None:
    """Raise an error if numbers of the ranks, by which they compare a batch, are not the same."""
    different = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
    if different is not None:
        raise kind(f"rank {different}: {batch} has other samples than on rank 0. {REMEDY}")


def compare_batches(sources: Sequence[object], numbers: Sequence[int], step: int) -> bool:
    """Return False if all ranks have ended, given the `agreement` of their batches, or 0; raise if these differ."""
    names = ", ".join(f"`{type(source).__name__}`" for source in sources)
    sizes = [number >> 32 for number in numbers]
    ended = [rank for rank, size in enumerate(sizes) if size < max(sizes)]
    if ended:
        rest = f" and {sizes[ended[0]]} samples" if sizes[ended[0]] else ""
        raise UnevenInputsError(
            f"{list_ranks(ended)}: {names} ended after {step} batches{rest}, and has more on other ranks. {REMEDY}"
        )
    kind = RanksOutOfStepError if step else UnsupportedFeatureError
    check_alike(numbers, f"batch {step} of {names}" if step else f"the first batch of {names}", kind)
    return any(numbers)


@dataclass(eq=False)
class SharedSampler:
    """Draws the indices of global batches alike on every rank, and yields the part of each that this rank fetches.

    The part may be empty. Without `is_cut` all of it is yielded, for loaders whose batches are cut after they have been
    fetched. Generators that are attributes of the samplers begin in the state of rank 0, and all other random numbers
    come from `GlobalBatches.rng`, so any sampler draws alike on all ranks.
    """

    sampler: Iterable[Any]  # a name by which generators are found, and Lightning's `set_epoch`
    batches: GlobalBatches
    data: object
    is_cut: bool
    costs: list[float] | None = None  # of all samples of the dataset, once they have been measured

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        rng = self.batches.rng()
        if self.batches.cost is not None and self.costs is None:
            with SeededRng(0).drawing():
                self.costs = measure_costs(self.data, self.batches.cost, self.batches.group)
        self._agree_on_generators()
        with rng.drawing():
            drawn = iter(self.sampler)
            indices = next(drawn, None)
        self.batches.compare_first(indices, self.sampler)
        # Changing and restoring the RNG state of the process takes longer than a batch of indices.
        order = self.sampler.sampler if type(self.sampler) is BatchSampler else self.sampler
        has_drawn_all = type(order) in (SequentialSampler, RandomSampler)
        while indices is not None:
            if self.is_cut:
                indices = as_sequence(indices)
                costs = None if self.costs is None else self._costs_of(indices)
                divided = self.batches.share(len(indices), hash_of(indices), costs)
                indices = divided.own(indices, self.batches.rank)
                if not self.batches.is_training:
                    self.batches.own_indices.append(as_indices(indices))
            yield indices
            with nullcontext() if has_drawn_all else rng.drawing():
                indices = next(drawn, None)

    def _costs_of(self, indices: Any) -> list[float]:
        assert self.costs is not None
        try:
            return [self.costs[index] for index in indices]
        except (TypeError, IndexError) as error:
            raise UnsupportedFeatureError(
                f"`cost` needs a dataset whose samples have the indices 0 to `len(dataset) - 1`, and"
                f" `{type(self.sampler).__name__}` yields {list(indices)[:3]}. Leave `cost` out."
            ) from error

    def _agree_on_generators(self) -> None:
        """Give the generators of the samplers the state that they have on rank 0."""
        generators = find_loader_rngs([self.sampler], excluded=[self.data])
        states = capture_states(generators)
        # A broadcast only if states differ, as it costs time and most samplers are seeded alike.
        rows = gather_integers([hash_of(states), len(generators)], self.batches.group)
        if any(row != rows[0] for row in rows) and all(row[1] for row in rows):
            restore_states(generators, broadcast_object(states, self.batches.group, 0))


def as_sequence(indices: Any) -> Any:
    """Return the indices of a batch as something to slice."""
    if isinstance(indices, list | tuple | torch.Tensor | numpy.ndarray):
        return indices
    if isinstance(indices, Iterable) and not isinstance(indices, Mapping | str):
        return list(indices)
    raise UnsupportedFeatureError(
        f"the batch sampler yields `{type(indices).__name__}`, which ranks cannot share. Yield a list of indices."
    )


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
                f" {type(error).__name__}: {text_of(error)}. Return a sample for every index, or use larger batches."
            ) from error

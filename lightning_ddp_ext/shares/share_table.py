"""The sizes of the ranks' shares of every global batch."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from lightning_ddp_ext._compat.torch import BatchNorm
from lightning_ddp_ext.batches.balance_controller import divide_by_shares
from lightning_ddp_ext.batches.chunk_sizes import ChunkRule, avoid_single_samples
from lightning_ddp_ext.errors import BatchSplitError
from lightning_ddp_ext.shares.costs import Deal, SampleCost

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
    shares: tuple[float, ...] | None
    limits: tuple[int | None, ...]
    avoids_single_samples: bool
    deal: Deal | None  # deals samples by their costs

    def divide(self, batch_size: int, costs: Sequence[float] | None) -> "DividedBatch":
        """Divide a batch, whose samples have costs or all cost the same."""
        nominal = _nominal_sizes(self, batch_size)
        if costs is None or self.deal is None:
            return DividedBatch(range(batch_size), nominal, nominal)
        chunks = self.deal(nominal, costs, self.rule.first)
        return DividedBatch([*chain(*chunks)], self.without_single_samples([*map(len, chunks)]), nominal)

    def without_single_samples(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return sizes without a single sample on a rank, if that is avoided, and possible within the limits."""
        if not self.avoids_single_samples:
            return tuple(sizes)
        return tuple(avoid_single_samples(sizes, self.rule.limits if self.shares is None else self.limits))


@functools.lru_cache(maxsize=64)
def _nominal_sizes(division: Division, batch_size: int) -> tuple[int, ...]:
    """Return the sizes of the shares if all samples cost the same."""
    if division.shares is None:
        return division.without_single_samples(division.rule.divide(batch_size, division.ranks))
    least = 1 + division.avoids_single_samples
    return division.without_single_samples(divide_by_shares(batch_size, division.shares, division.limits, least))


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
        self.lead = 0  # batches that any rank may have drawn ahead of the one that has begun last
        self.rule = rule
        self._ranks = ranks
        self.avoids_single_samples = avoids_single_samples  # batch normalisation refuses them in training
        self.first = 0  # number of the first batch of this epoch
        # (number of the first batch, shares, limits)
        self._changes: list[tuple[int, list[float], list[int | None]]] = []

    def check_batch_size(self, batch_size: int | None) -> None:
        """Raise an error if a rank gets no sample of such batches, although the options give it a share."""
        if not isinstance(batch_size, int):
            return
        sizes = list(self.division(self.begun, is_training=True).divide(batch_size, None).sizes)
        for rank, (size, proportion) in enumerate(zip(sizes, self.rule.divide(_MANY, self._ranks), strict=True)):
            if proportion and not size:
                why, remedy = "", ""
                if self.avoids_single_samples:
                    why, remedy = ", because batch normalisation needs two on a rank", "`sync_batchnorm=True`, "
                raise BatchSplitError(
                    f"rank {rank} never gets a sample: batches of {batch_size} are shared as {sizes}{why}.",
                    f"Use {remedy}larger batches or fewer devices, or give the rank no share.",
                )

    def begin_epoch(self, skip: int) -> int:
        """Begin an epoch, of which an interrupted run has used `skip` batches; return the number of its first batch."""
        self.first = self.begun
        self.begun += skip
        held = [change for change in self._changes if change[0] <= self.first][-1:]
        self._changes = held + [change for change in self._changes if change[0] > self.first]
        return self.first

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
        shares, limits = (None, ()) if held is None else (tuple(held[1]), tuple(held[2]))
        avoids_single_samples = is_training and self.avoids_single_samples
        deal = None if self.cost is None or not is_training else self.cost.deal
        return Division(self.rule, self._ranks, shares, limits, avoids_single_samples, deal)

    def state_dict(self, is_within_epoch: bool) -> dict[str, Any]:
        """Return the shares since the beginning of this epoch, or for the next one, whose first batch gets number 0."""
        first = self.first if is_within_epoch else self.begun
        changes = [[max(0, number - first), shares, limits] for number, shares, limits in self._changes]
        return {"changes": changes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state; shares of another number of ranks are ignored."""
        self._changes = [(at, shares, limits) for at, shares, limits in state["changes"] if len(shares) == self._ranks]


class SharedBatch(NamedTuple):
    """A batch that ranks share."""

    table: ShareTable  # which has divided the batch
    number: int  # in the run
    sizes: tuple[int, ...]  # number of samples of each rank
    drawn: int  # hash of the indices, or of the samples of a stream
    nominal: tuple[int, ...]  # the sizes if all samples had the same cost

    @property
    def agreement(self) -> int:
        """A number below 2 ** 53 that ranks compare: of samples, then 32 bits for the samples and their division."""
        return (min(sum(self.sizes), 2**20) << 32) + (self.drawn + hash(self.sizes)) % 2**32


def combine_shares(taken: Sequence[SharedBatch], checks: bool = True) -> SharedBatch:
    """Return the shares of a step on batches of several loaders, all with the number of the first; check them."""
    if checks:
        check_shares(taken)
    return taken[0]._replace(drawn=sum(one.drawn for one in taken) % 2**32)


def check_shares(taken: Sequence[SharedBatch]) -> None:
    """Raise an error if the batches of a step are not divided in the same proportions, or are empty."""
    first = taken[0]
    total, rule = sum(first.sizes), first.table.rule
    is_fixed = not (rule.is_auto or rule.is_free)  # batches that are in proportion stay so
    if not total:
        raise BatchSplitError("a batch has no samples. Leave empty batches out in the data loader.")
    for other in taken[1:]:
        number = sum(other.sizes)
        is_proportional = all(one * number == size * total for one, size in zip(first.sizes, other.sizes, strict=True))
        # Equal sizes stay equal if shares change.
        if other.sizes != first.sizes and not (is_proportional and is_fixed):
            or_even = "" if is_fixed else ', and use `balance="even"` unless each step uses all loaders'
            raise BatchSplitError(
                f"the loaders of a step give {total} and {number} samples, in the shares {list(first.sizes)}"
                f" and {list(other.sizes)}, but a rank has one weight in a step. Give all loaders the same `batch_size`"
                f" and `drop_last=True`, leave `cost` out{or_even}. Under Fabric, delete iterators that are out of use."
            )

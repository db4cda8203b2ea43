"""The sizes of the ranks' shares of every global batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_ddp_ext._compat.torch import BatchNorm
from lightning_ddp_ext.batches.balance_controller import divide_by_shares
from lightning_ddp_ext.batches.chunk_sizes import ChunkRule, chunks_by_cost, merge_single_samples
from lightning_ddp_ext.errors import BatchSplitError

_CHANGES = "changes"
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

    def sizes(self, batch_size: int, costs: Sequence[float] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the number of samples of each rank, and the same if all samples had the same cost."""
        if self.shares is None:
            nominal = self._merged(self.rule.divide(batch_size, self.ranks))
        else:
            nominal = self._merged(divide_by_shares(batch_size, self.shares, self.limits))
        return nominal if costs is None else self._merged(chunks_by_cost(nominal, costs)), nominal

    def _merged(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(merge_single_samples(sizes) if self.avoids_single_samples and sum(sizes) > 1 else sizes)


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
        cost: Callable[[Any], float] | None = None,
    ) -> None:
        self.cost = cost if ranks > 1 else None  # of a sample; None if all samples cost the same
        self.begun = 0  # batches that training has begun
        self._rule = rule
        self._ranks = ranks
        self.avoids_single_samples = avoids_single_samples  # batch normalisation refuses them in training
        self._first = 0  # number of the first batch of this epoch
        self._changes: list[tuple[int, list[float], list[int | None]]] = []  # with the first batch for which they hold

    def check_batch_size(self, batch_size: int) -> None:
        """Raise an error if a rank gets no sample of such batches, although the options give it a share."""
        sizes = self._rule.divide(batch_size, self._ranks)
        for rank, (size, proportion) in enumerate(zip(sizes, self._rule.divide(_MANY, self._ranks), strict=True)):
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

    def begin_batch(self, number: int) -> None:
        """Begin a training batch."""
        self.begun = number + 1

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
        return Division(self._rule, self._ranks, shares, limits, is_training and self.avoids_single_samples)

    def state_dict(self, is_within_epoch: bool) -> dict[str, Any]:
        """Return the shares since the beginning of this epoch, or for the next one, whose first batch gets number 0."""
        first = self._first if is_within_epoch else self.begun
        changes = [[max(0, number - first), shares, limits] for number, shares, limits in self._changes]
        return {_CHANGES: changes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state of as many ranks."""
        self._changes = [(number, shares, limits) for number, shares, limits in state[_CHANGES]]

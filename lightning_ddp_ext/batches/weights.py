"""Weights of batches and of their parts, in losses, gradients and logged values; windows of accumulated gradients."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from traceback import walk_stack
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext._compat.torch import replaced_collectives
from lightning_ddp_ext._validation import as_number
from lightning_ddp_ext.batches.label_counts import TokenCount
from lightning_ddp_ext.batches.sample_counts import BatchSamples
from lightning_ddp_ext.errors import WarnOnce

_Name = Literal["samples", "tokens", "equal", "sum"]
_MEANINGS = {
    "samples": "a mean over samples",
    "tokens": "a mean over tokens",
    "equal": "a mean over parts of equal weight",
    "sum": "a sum",
}
WeightBy = _Name | Callable[[Any], float]


class WeightRule:
    """A checked `weight_by`: the weight of a batch or chunk, and whether losses are added up or averaged.

    `inform` is called once with a sentence on the weights, if a batch has to show what they are.
    """

    def __init__(self, weight_by: WeightBy, inform: Callable[[str], None]) -> None:
        names = get_args(_Name)
        if isinstance(weight_by, type) and any("__call__" in vars(base) for base in weight_by.__mro__):
            raise TypeError(
                f"`weight_by` is the class `{weight_by.__name__}`. Use an object: `{weight_by.__name__}()`."
            )
        if not callable(weight_by) and weight_by not in names:
            raise ValueError(
                f"`weight_by` must be one of {', '.join(map(repr, names))} or a callable `batch -> float`, got"
                f' {weight_by!r}. Use "samples" for a loss that is a mean over samples.'
            )
        self.is_sum = weight_by == "sum"  # losses are sums: gradients are added up, not averaged
        self.is_by_samples = weight_by == "samples"
        self.meaning = _MEANINGS[weight_by] if isinstance(weight_by, str) else "a mean over what `weight_by` counts"
        self.function = TokenCount() if weight_by == "tokens" else weight_by if callable(weight_by) else None
        self.of_any_batch = None if self.is_by_samples or self.function is not None else 1.0  # None if batches differ
        self._inform: Callable[[str], None] | None = inform
        self._warn = WarnOnce()

    def weigh(self, batch: Any, samples: float) -> float:
        """Return the weight of a batch or chunk with this number of samples."""
        if self.function is None:
            return self.of_any_batch or float(samples)
        given = self.function(batch)
        weight = as_number(given)
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"`weight_by` returned {given!r} for a batch. Return a finite number of at least 0, such as its number"
                " of samples or tokens."
            )
        if self._inform is not None and isinstance(self.function, TokenCount) and self.function.finding is not None:
            self._inform(f"{self.function.finding}.")
            self._inform = None
        return weight

    def normalize(self, weights: Sequence[float]) -> list[float]:
        """Return the factors of the parts' losses: the weights of sums, else divided by their total; all may be 0."""
        total = 1.0 if self.is_sum else sum(weights)
        return [weight / total if total else 0.0 for weight in weights]

    def warn_of_skip(self, part: str) -> None:
        """Warn, the first time only, that `training_step` has returned None on `part`, such as `"rank 1"`."""
        self._warn(
            f"`training_step` returned None on {part}, whose samples have no weight in the gradient of this step."
            " Ignore this if it is on purpose. Log with `sync_dist=True` before returning None, if at all."
        )


WindowSum = tuple[float, float | None, float | None]
"""Weight, scale and divisor of the gradient of a window, see `GradientReducer.synchronize`."""


class AccumulationWindow:
    """The micro-batches whose gradients are added up before ranks synchronise them; then the next window begins.

    The loss of a micro-batch is multiplied by its weight relative to `unit`, or else to the first weight above 0, so
    that the factor is 1 as long as weights are equal. The accumulated gradient times this weight is the weighted sum.
    """

    def __init__(self) -> None:
        self.unit = 0.0  # the same on all ranks, if the losses of ranks have to be weighted too: see `common_unit`
        self.is_postponed = False  # the synchronisation is, so that the window continues
        self.skips_pass = False  # the next backward pass has no weight
        self.begin()

    def begin(self) -> None:
        """Begin a window, because the gradients of the last one were synchronised or dropped.

        Lightning drops them before the first micro-batch of a window, and a loop of Fabric with `zero_grad`.
        """
        self.first = self.total = 0.0
        self.length = 0

    def add(self, weight: float) -> None:
        """Add a micro-batch."""
        self.first = self.first or self.unit or weight
        self.total += weight
        self.length += 1

    def weigh(self, weight: float) -> float:
        """Return the factor of the loss of a micro-batch that was added with this weight, before its backward pass."""
        factor = weight / self.first if self.first else 0.0
        self.skips_pass = not factor
        return factor

    @contextmanager
    def postpone(self, is_postponed: bool = True) -> Iterator[None]:
        """Postpone the synchronisation in a block, maybe inside of another such block."""
        outer, self.is_postponed = self.is_postponed, self.is_postponed or is_postponed
        try:
            yield
        finally:
            self.is_postponed = outer


class BatchWeights:
    """The weight of a batch of the Trainer in the gradient and in the logged means, and its accumulation window."""

    def __init__(self, rule: WeightRule, samples: BatchSamples, rank: int, counts: bool, is_automatic: bool) -> None:
        self.window = AccumulationWindow()
        self.weight = 0.0  # of the micro-batch in the gradient
        self.log_weight = 0.0  # of the values that it logs
        self.is_sum = rule.is_sum
        self.differ = rule.of_any_batch is None
        self.is_automatic = is_automatic
        self._rule = rule
        self._samples = samples
        self._rank = rank
        self._counts = counts and rule.is_by_samples  # else each batch has the weight 1
        self._is_added = False  # the micro-batch is in the window

    def begin(self, begins_window: bool) -> None:
        """Begin a step, on a rank without a micro-batch too."""
        self.log_weight = self.weight = 0.0
        self._is_added = False
        if begins_window:
            self.window.begin()

    def weigh(self, batch: Any) -> None:
        """Weigh the micro-batch of this rank."""
        samples = self._samples.require(batch, self._rank) if self._counts else 1.0
        self.log_weight = self.weight = self._rule.weigh(batch, samples)

    def skip(self) -> None:
        """Give the micro-batch no weight in the gradient, because `training_step` has returned None."""
        self.weight = 0.0
        self._rule.warn_of_skip(f"rank {self._rank}")

    def add(self) -> None:
        """Add the micro-batch to the window, once until a synchronisation."""
        if not self._is_added or not self.window.length:
            self._is_added = True
            self.window.add(self.weight)

    def weigh_loss(self, loss: Tensor, ranks: int) -> Tensor:
        """Return the loss of the micro-batch, weighted relative to earlier ones; `ranks` have a micro-batch."""
        self.add()
        factor = self.window.weigh(self.weight)
        if factor and not self.is_automatic:
            # Gradients may hold the sum over ranks of an earlier pass. It is averaged again, so it must stay unchanged.
            factor = float(ranks) if self.is_sum else 1.0
        return loss if factor in (0.0, 1.0) else loss * factor

    def of_window(self, accumulates: int) -> WindowSum:
        """Return weight, scale and divisor of the window's gradient, whose losses Lightning divides by `accumulates`.

        Under manual optimization the user has averaged the accumulated losses.
        """
        if self.is_automatic:
            return self.window.total, self.window.first * accumulates, 1.0 if self.is_sum else None
        return min(self.window.total, 1.0) if self.is_sum else self.window.total, None, None


def common_unit(weights: Sequence[float]) -> float:
    """Return a power of two near the mean of the weights of ranks, without zeros; 1 if there are none.

    Gradients that flow through collectives, as of `nn.SyncBatchNorm`, are added up over ranks in the backward pass,
    before the reducer can weight them. The weights then have to be in the losses, relative to a number that is the same
    on all ranks. A power of two rounds nothing.
    """
    known = [*filter(None, weights)]
    return 2.0 ** round(math.log2(sum(known) / len(known))) if known else 1.0


_COMBINING = ("all", "reduce_scatter")  # beginnings of collectives that give a rank values of other ranks


class CommunicationWatch:
    """Knows if steps communicate; then losses are weighted before their backward passes, or else warns.

    Under manual optimization losses cannot be weighted, since gradients may hold a mean over ranks already.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._epoch: int | None = None  # in which a step has been watched
        self._communicates = False  # `training_step` has issued collectives that combine values of ranks
        self._warn = WarnOnce()

    def watch(self, epoch: int, weights: BatchWeights, own: dist.ProcessGroup) -> AbstractContextManager[None]:
        """Note collectives in a block, except in the group `own` and in metrics.

        Only in the first step of an epoch, because replacing collectives takes time, and if batches differ in weight.
        """
        if self._epoch == epoch or self._communicates or not weights.differ:
            return nullcontext()
        self._epoch = epoch

        def find(group: dist.ProcessGroup, name: str) -> None:
            if name.startswith(_COMBINING) and group is not own:
                callers = [str(frame.f_globals.get("__name__")) for frame, _ in walk_stack(None)]
                self._communicates |= not any(module.startswith("torchmetrics") for module in callers)

        def resolve(group: dist.ProcessGroup) -> dist.ProcessGroup:
            find(group, _COMBINING[0])
            return group

        return replaced_collectives(find, resolve, lambda: None)

    def weigh_loss(self, loss: Tensor, weights: BatchWeights, of_ranks: Sequence[float], active: int) -> Tensor:
        """Return the weighted loss, given the weights of ranks in the last synchronisation; `active` ones have data."""
        if self._communicates and weights.is_automatic:
            weights.window.unit = common_unit(of_ranks)
        return weights.weigh_loss(loss, active)

    def warn(self, weights: BatchWeights, of_ranks: Sequence[float]) -> None:
        """Warn once, on the first rank with data, if ranks had different weights in the last synchronisation."""
        known = [*filter(None, of_ranks)]
        if not self._communicates or weights.is_automatic or len({*known}) < 2:
            return
        if self._rank == list(of_ranks).index(known[0]):
            self._warn(
                "`training_step` communicates between ranks, whose batches have different weights. Under manual"
                " optimization, gradients that flow through collectives, as of `SyncBatchNorm` or gathered features,"
                ' are not weighted. Use batches of equal size or automatic optimization, or `weight_by="equal"` if each'
                " rank computes the loss of all samples. Ignore this if no gradient flows through collectives."
            )

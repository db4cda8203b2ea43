"""The accumulation of gradients in a loop of the user, which no hook announces."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import NamedTuple

from torch import nn
from typing_extensions import override

from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.fabric.loaders import LoopBatch
from lightning_ddp_ext.reducer.gradient_reducer import AccumulationWindow, GradientMark, GradientReducer


class _Synchronized(NamedTuple):
    """The last window that has been synchronised."""

    total: float  # weight of this rank
    length: int
    ranks: int  # number of the ranks that had a batch


class LoopWindow(AccumulationWindow):
    """The micro-batches whose gradients a loop of the user adds up before ranks synchronise them.

    A micro-batch is weighted once, however many backward passes it has. `zero_grad` drops an unfinished window. A
    backward pass that follows the synchronisation without a new batch belongs to the same window, until gradients are
    dropped or parameters change.
    """

    def __init__(self, is_sum: bool) -> None:
        self._is_sum = is_sum  # losses are added up, over micro-batches and ranks
        self._modules: tuple[object, ...] = ()  # that `no_backward_sync` names in the first pass
        self._mark: GradientMark | None = None  # if the next pass may belong to a window
        self._is_again = False  # the pass belongs to the window that has ended
        self.last = _Synchronized(0.0, 0, 0)
        super().__init__()

    @override
    def begin(self) -> None:
        super().begin()
        self._ranks: set[int] = set()  # with a batch in this window
        self._is_single = True  # the window has one backward pass

    def begin_pass(
        self, batch: LoopBatch, new: Sequence[LoopBatch], active: Iterable[int], modules: tuple[object, ...]
    ) -> float:
        """Begin a backward pass, and return the factor of its loss.

        `new` batches have been given since the last pass, `active` ranks have a batch, and the synchronisation of
        `modules` is postponed.
        """
        weight = batch.weight or 0.0
        if self._is_sum:
            weight = min(weight, 1.0)
        mark, self._mark = self._mark, None
        is_dropped = mark is not None and mark.lift()
        if is_dropped:
            self.begin()
        is_open, is_new = bool(self.length), bool(new or batch.is_reweighted)
        self._is_again = not (is_new or is_open or self.is_postponed or mark is None or is_dropped or mark.has_stepped)
        if self._is_again:
            return self._weigh_again(weight)
        if not is_open:
            self._modules = modules
        elif modules not in ((), self._modules):
            raise UnsupportedFeatureError(
                "`fabric.no_backward_sync` names another module than in the last backward pass, whose gradients are not"
                " synchronised yet, and the gradients of all modules are synchronised together. End the accumulation of"
                " one module before that of the next begins, or name both modules each time."
            )
        if is_new or not is_open:
            self.add(weight, () if batch.has_given_weight else [one.weight or 0.0 for one in new])
        self._ranks.update(active)
        self._is_single = not (is_open or self.is_postponed)
        factor = self.weigh(weight)
        return factor * len(self._ranks) if self._is_sum and self._is_single else factor

    def _weigh_again(self, weight: float) -> float:
        """Return the factor of another loss of the last micro-batch, whose window has been synchronised."""
        last = self.last
        self.skips_pass = not weight
        if self._is_sum:
            return float(last.ranks) if weight else 0.0
        return weight * last.length / last.total if last.total else 0.0

    def synchronize_pass(self, reducer: GradientReducer, position: int) -> AbstractContextManager[None]:
        """Synchronise the gradients of the backward pass in the block and end the window, unless that is postponed."""
        if self._is_again:
            weight, scale = self.last.total, None
        elif self._is_sum:
            weight = min(self.total, 1.0)
            # Gradients that were synchronised before stay as they are only if the scale is the weight.
            scale = None if self._is_single else weight * len(self._ranks)
        else:
            weight, scale = self.total, self.first * self.length  # the user has divided each loss by the length
        if not (self.is_postponed or self._is_again):
            self.last = _Synchronized(weight, self.length, len(self._ranks))
        return self.synchronize(reducer, weight, scale, None, position)

    def end_pass(self, reducer: GradientReducer, modules: Iterable[nn.Module]) -> None:
        """End a backward pass of modules; mark a gradient that is dropped together with the window."""
        if not self.length and self.last.length == 1:
            return  # a further pass would be a window like this one
        named = [module for module in self._modules if isinstance(module, nn.Module)]
        parameters = chain.from_iterable(module.parameters() for module in named or modules)
        trained = (parameter for parameter in parameters if parameter.requires_grad)
        if self.length:
            marked = next(chain(reducer.unsynchronized_parameters(), trained), None)
        else:
            marked = next((parameter for parameter in trained if parameter.grad is not None), None)
        self._mark = None if marked is None else GradientMark(marked)

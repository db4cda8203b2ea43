"""The accumulation of gradients in a loop of the user, which no hook announces."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_ddp_ext._compat.torch import version_of
from lightning_ddp_ext.batches.weights import AccumulationWindow, WindowSum
from lightning_ddp_ext.errors import BatchSplitError, UnsupportedFeatureError
from lightning_ddp_ext.fabric.loaders import LoopBatch
from lightning_ddp_ext.reducer.control import Control, ControlField
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer

_DIFFERENT = -1.0


class GradientMark:
    """Notices if the gradients of an unfinished window are dropped, as by `zero_grad` of a module or an optimizer.

    Without a gradient, such as on a rank without data, zeros stand in for it until `lift`.
    """

    def __init__(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        self._stands_in = gradient is None
        if gradient is None:
            parameter.grad = gradient = torch.zeros_like(parameter)
        self._parameter, self._gradient = parameter, gradient
        self._versions = version_of(parameter), version_of(gradient)

    @property
    def has_stepped(self) -> bool:
        """Whether the parameter has changed, as in a step of its optimizer."""
        return version_of(self._parameter) != self._versions[0]

    def lift(self) -> bool:
        """Remove the mark; return True if the gradient has been dropped."""
        gradient = self._parameter.grad
        is_dropped = gradient is None or (version_of(gradient) != self._versions[1] and not gradient.any())
        if self._stands_in and gradient is self._gradient:
            self._parameter.grad = None
        return is_dropped


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

    is_of_parts = False  # batches come in parts, each with a weight

    def __init__(self, is_sum: bool) -> None:
        self._is_sum = is_sum  # losses are added up, over micro-batches and ranks
        self._modules: tuple[object, ...] = ()  # that `no_backward_sync` names in the first pass
        self._mark: GradientMark | None = None  # if the next pass may belong to a window
        self._is_again = False  # the pass belongs to the window that has ended
        self.last = _Synchronized(0.0, 0, 0)
        self._rank = 0
        self._loader_weights: list[Sequence[float]] = []  # of micro-batches that have batches of several loaders
        self._proportions = ControlField()
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
        self._check_modules(is_open, modules)
        if is_new or not is_open:
            self._note_loaders([] if batch.has_given_weight else [one.weight or 0.0 for one in new])
            self.add(weight)
        self._ranks.update(active)
        self._is_single = not (is_open or self.is_postponed)
        factor = self.weigh(weight)
        return factor * len(self._ranks) if self._is_sum and self._is_single else factor

    def _check_modules(self, is_open: bool, modules: tuple[object, ...]) -> None:
        """Note the modules whose synchronisation is postponed, the same in all passes of a window."""
        if not is_open:
            self._modules = modules
        elif modules not in ((), self._modules):
            raise UnsupportedFeatureError(
                "`fabric.no_backward_sync` names another module than in the last backward pass, whose gradients are not"
                " synchronised yet, and the gradients of all modules are synchronised together. End the accumulation of"
                " one module before that of the next begins, or name both modules each time."
            )

    def _note_loaders(self, weights: Sequence[float]) -> None:
        """Note the weights of the batches of a micro-batch, of which a rank has one weight."""
        if not self.length:
            self._loader_weights = []
        if len(weights) > 1:
            self._loader_weights.append(weights)
        self._proportions.value = _proportions(self._loader_weights)

    def _weigh_again(self, weight: float) -> float:
        """Return the factor of another loss of the last micro-batch, whose window has been synchronised."""
        last = self.last
        self.skips_pass = not weight
        if self._is_sum:
            return float(last.ranks) if weight else 0.0
        return weight * last.length / last.total if last.total else 0.0

    def of_pass(self) -> WindowSum:
        """Return weight, scale and divisor of the gradient that the present backward pass completes."""
        if self._is_again:
            return self.last.total, None, None
        if self._is_sum:
            weight = min(self.total, 1.0)
            # Gradients that were synchronised before stay as they are only if the scale is the weight.
            scale = None if self._is_single else weight * len(self._ranks)
        else:
            weight, scale = self.total, self.first * self.length  # the user has divided each loss by the length
        if not self.is_postponed:
            self.last = _Synchronized(weight, self.length, len(self._ranks))
        return weight, scale, None

    def connect(self, control: Control, rank: int) -> None:
        """Compare the proportions of weights of several loaders among ranks, in each synchronisation."""
        self._rank = rank
        self._proportions = control.add(self._check)

    def _check(self, proportions: Sequence[float]) -> None:
        if len({0.0, *proportions}) <= 2 and _DIFFERENT not in proportions:
            return
        own = "; ".join(", ".join(f"{weight:g}" for weight in weights) for weights in self._loader_weights)
        first, *others = (proportions.index(one) for one in dict.fromkeys(proportions) if one)
        between = "micro-batches" if _DIFFERENT in proportions else f"ranks {first} and {others[0]}"
        raise BatchSplitError(
            f"rank {self._rank}: the loaders of a step give batches of the weights {own or 0}, in proportions that"
            f" differ between {between}, but a rank has one weight in a step.",
            "Give the loaders batch sizes in one proportion and `drop_last=True`, take a batch from each loader"
            " right before its `fabric.backward`, or set `fabric.strategy.batch_weight`.",
        )

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


def _proportions(rows: Sequence[Sequence[float]]) -> float:
    """Return a number above 0 for the proportions of weights in all rows; 0 if there are none."""
    # The hash of floats is the same in all processes.
    found = {1.0 + hash(tuple(weight / sum(row) for weight in row)) % 2**32 for row in rows if sum(row)}
    return _DIFFERENT if len(found) > 1 else sum(found)

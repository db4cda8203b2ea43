"""The windows of a loop over batches that are cut into parts, the virtual ranks of a Fabric."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from typing_extensions import override

from lightning_ddp_ext.batches.weights import WindowSum
from lightning_ddp_ext.errors import RanksOutOfStepError, UnsynchronizedGradientsError
from lightning_ddp_ext.fabric.accumulation import GradientMark, LoopWindow
from lightning_ddp_ext.fabric.loaders import LoopBatch
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from lightning_ddp_ext.reducer.virtual_reducer import VirtualReducer

_LOOP = "`for part in fabric.strategy.parts(batch)`"


class VirtualWindow(LoopWindow):
    """The batches whose gradients a loop adds up; ranks synchronise each of them in the backward pass of its last part.

    The window continues after a batch whose last backward pass `fabric.no_backward_sync` postpones, unless gradients
    are dropped.
    """

    is_of_parts = True
    _reducer: VirtualReducer  # of the current batch

    def __init__(self, is_sum: bool) -> None:
        super().__init__(is_sum)
        super().begin()
        self.batch: LoopBatch | None = None  # the current one, or the last
        self.part: int | None = None  # the current one, until the end of the batch; -1 for a copy of one
        self._passes, self._is_last = 0, False  # of the current part
        self._unit = 1.0  # weight of a part whose loss has the factor 1

    @override
    def begin(self) -> None:
        """Do nothing at a synchronisation, after which the window may continue."""

    def check_has_ended(self) -> None:
        """Check that the loop over the parts of the last batch has come to its end."""
        if self.part is not None:
            raise RanksOutOfStepError(
                f"rank {self._rank}: a loop over `fabric.strategy.parts` has ended before its last part, in which ranks"
                " synchronise gradients. Leave out `break`."
            )

    def begin_batch(
        self, batch: LoopBatch, reducer: VirtualReducer, numbers: Sequence[int], sizes: Sequence[int]
    ) -> range:
        """Begin a batch with parts of these sizes, of which ranks compute these numbers; return those of this rank."""
        self.check_has_ended()
        if reducer.unsynchronized_parameters():
            raise UnsynchronizedGradientsError(
                f"rank {self._rank}: a batch begins with gradients that have not been synchronised with the other"
                f" ranks. Call `fabric.backward` in {_LOOP} instead of `loss.backward`."
            )
        self.batch, self._reducer = batch, reducer
        is_dropped = self._mark is not None and self._mark.lift()
        if is_first := is_dropped or not self.length:
            self._unit, self.length = 1.0 if self._is_sum else float(sum(sizes)), 0
        self.length, self.total = self.length + 1, 0.0
        unit = 1.0 if self._is_sum else self._unit * self.length  # the user has divided each loss by the length
        return reducer.begin(numbers, sizes, is_first, unit, self._is_sum)

    def begin_part(self, part: int, is_last: bool) -> None:
        """Begin a part."""
        self.part, self._is_last, self._passes = part, is_last, 0
        self._set_mark(self._reducer.unsynchronized_parameters())

    def _set_mark(self, parameters: Iterable[Tensor]) -> None:
        marked = next((one for one in parameters if one.grad is not None), None)
        self._mark = None if marked is None else GradientMark(marked)

    @override
    def begin_pass(
        self, batch: LoopBatch, new: Sequence[LoopBatch], active: Iterable[int], modules: tuple[object, ...]
    ) -> float:
        if self.part is None or self._passes:
            found = "outside of it" if self.part is None else "again in the same part"
            raise RanksOutOfStepError(
                f"rank {self._rank}: with `virtual_ranks`, each part of a batch has one backward pass, and"
                f" `fabric.backward` is called {found}. Call it once in {_LOOP}."
            )
        if self._mark is not None and self._mark.lift():
            raise UnsynchronizedGradientsError(
                f"rank {self._rank}: gradients were dropped between the parts of a batch. Call `zero_grad` before"
                f" {_LOOP}."
            )
        if self._is_last:
            self._check_modules(self.length > 1, modules)
        weight = batch.weight or 0.0
        self._passes += 1
        self.total += weight
        self._reducer.continues, self.is_postponed = self.is_postponed, not self._is_last
        if self._is_last and self.part >= 0:
            self._reducer.end_part(self.part, weight)  # which notes the weight, before ranks exchange it
        factor = weight / self._unit
        self.skips_pass = not factor
        return factor

    @override
    def of_pass(self) -> WindowSum:
        return self.total, None, None

    @override
    def end_pass(self, reducer: GradientReducer, modules: Iterable[nn.Module]) -> None:
        self.is_postponed, self._mark = self._reducer.continues, None
        if self._is_last and self.is_postponed:
            self._set_mark(parameter for module in modules for parameter in module.parameters())
        elif self._is_last:
            self.length = 0

    def end_part(self, weight: float) -> None:
        """End a part, with its batch if it is the last one."""
        assert self.part is not None  # as `begin_part` came before
        if not self._passes:
            name = f"virtual rank {self.part}" if self.part >= 0 else "the copy of a part"
            raise RanksOutOfStepError(
                f"rank {self._rank}: {name} has made no backward pass, for which other ranks wait."
                " Call `fabric.backward` in each part, such as of `0 * loss`; to evaluate, iterate over the batch."
            )
        if self._is_last:
            self.part = None
        else:
            self._reducer.end_part(self.part, weight)

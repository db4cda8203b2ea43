"""Callback that compares the gradient of the parts of a batch with the gradient of the whole batch."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import takes_dataloader_iter
from lightning_ddp_ext._compat.torch import BatchNorm
from lightning_ddp_ext._lightning import Callback, LightningModule, Trainer, rank_zero_warn
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext._validation import check_integer
from lightning_ddp_ext.batches.containers import to_device
from lightning_ddp_ext.batches.splitting import count_samples, join_batches
from lightning_ddp_ext.batches.weights import WeightBy
from lightning_ddp_ext.distributed.exchange import broadcast_object, gather_objects
from lightning_ddp_ext.distributed.serialization import name_skipped, pack, unpack
from lightning_ddp_ext.errors import BatchSplitError, ImpossibleError, describe_error
from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy
from lightning_ddp_ext.verification.relations import GradientFit
from lightning_ddp_ext.verification.replay import BatchReplay

_SHOWN = 8  # weights in a message


@dataclass(frozen=True, slots=True)
class GradientRecord:
    """Comparison of the gradients of the parts and the whole of one training batch.

    Attributes:
        batch: Number of training batches before this one.
        difference: Norm of the difference over all parameters, relative to the norm of the gradient of the whole batch.
        parameter: Parameter with the largest part of the difference.
        parameter_difference: Relative difference of this parameter.
        tolerance: Largest relative difference that rounding explains: the square root of the precision of the
            parameters or of the loss, whichever is coarser, at most 0.01.
        weights: Factor of the gradient of each part.
        fitted_weights: Factors with the least difference; None if they are not unique.
        remedy: Likely cause of the difference, and what to do; None if parts and whole agree.
    """

    batch: int
    difference: float
    parameter: str
    parameter_difference: float
    tolerance: float
    weights: list[float]
    fitted_weights: list[float] | None
    remedy: str | None


class GradientCheck(Callback):
    """Compares the gradient of the parts of a batch with the gradient of the whole batch, in the first batches.

    Parts are the chunks of `balanced_dp`, the shares of `balanced_ddp`, or the batches of the ranks of
    `ddp_checkpoint` and `ddp_join` in one step.
    Each part runs `training_step` and a backward pass by itself; one device (rank 0) runs the whole batch, without the
    parts whose `training_step` returned None. A difference beyond rounding means that the loss, the model or
    `weight_by` does not have the form that the strategy needs: a warning gives the remedy.

    Steps run on copies of the module with the parameters from before the batch, in the precision of the parameters and
    without dropout, each micro-batch of an accumulation window by itself. The training run does not change by one bit.
    Only files and objects outside of the module are changed once more by each part and by the whole batch.

    If a check is impossible, a warning names the reason: manual optimization, a step that takes `dataloader_iter`,
    collectives in the step, batches of ranks that cannot be joined (texts padded to different lengths, samples in
    another dimension than `batch_dim`), an error of the step on the copy, or another strategy.

    Args:
        batches: Number of training batches to compare, from the start of training. Batches with one part are skipped.

    Attributes:
        records: Comparisons since the start of training, the same on every rank.
        reason: Why the check ended early; None if it did not.

    Raises:
        TypeError: If `batches` is not an integer.
        ValueError: If `batches` is below 1.
    """

    def __init__(self, batches: int = 1) -> None:
        check_integer("batches", batches, least=1, remedy="Remove the callback to compare nothing.")
        self.batches = batches
        self._reset()

    def _reset(self) -> None:
        self.records: list[GradientRecord] = []
        self.reason: str | None = None
        self._batch = 0
        self._step: BatchReplay | None = None
        self._has_ended = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reset()
        with self._ended_by_a_reason():
            _check_run(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._has_ended:
            self._step = BatchReplay(trainer, pl_module, batch, batch_idx)

    # After the step, so that an error of the step is raised by training itself, and the weights of the parts are known.
    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        strategy: Any = trainer.strategy
        compare = _compare_chunks if isinstance(strategy, BalancedDataParallelStrategy) else _compare_ranks
        with self._ended_by_a_reason(), step.training_unaffected():
            record = compare(strategy, step, self._batch)
            self._batch += 1
            if record is not None:
                self._add(record)

    def _add(self, record: GradientRecord) -> None:
        if record.remedy is not None and all(earlier.remedy is None for earlier in self.records):
            rank_zero_warn(
                f"GradientCheck: in batch {record.batch}, the gradient of the parts (weights {_show(record.weights)})"
                f" differs from the gradient of the whole batch by {record.difference:.1e} (relative), most in"
                f" `{record.parameter}` ({record.parameter_difference:.1e}). {record.remedy}",
                category=UserWarning,
            )
        self.records.append(record)
        if len(self.records) == self.batches:
            self._conclude()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._has_ended:
            self._conclude()

    def _conclude(self) -> None:
        self._has_ended = True
        if not self.records:
            rank_zero_warn("GradientCheck compared nothing: no batch had two parts.", category=UserWarning)
            return
        differing = sum(record.remedy is not None for record in self.records)
        largest = max(record.difference for record in self.records)
        rank_zero_info(
            f"GradientCheck: parts and whole batch have the same gradient in {len(self.records) - differing} of"
            f" {len(self.records)} batches; relative difference up to {largest:.1e}. Dropout was off."
        )

    @contextmanager
    def _ended_by_a_reason(self) -> Iterator[None]:
        """End the comparisons if the block finds that a check is impossible."""
        try:
            yield
        except ImpossibleError as error:
            self.reason, self._has_ended = str(error), True
            compared = f"{len(self.records)} of {self.batches} batches" if self.records else "nothing"
            rank_zero_warn(f"GradientCheck compared {compared}: {error}.", category=UserWarning)


@contextmanager
def _raised_on_every_rank(group: dist.ProcessGroup) -> Iterator[None]:
    """Raise an ImpossibleError of any rank on all ranks, after the block."""
    problem = None
    try:
        yield
    except ImpossibleError as error:
        problem = str(error)
    for rank, found in enumerate(gather_objects(problem, group)):
        if found is not None:
            raise ImpossibleError(f"{found} (rank {rank})")


def _check_run(trainer: Trainer, module: LightningModule) -> None:
    strategy = trainer.strategy
    if not isinstance(strategy, BalancedDataParallelStrategy | ExplicitDDPStrategy):
        raise ImpossibleError(
            f"{type(strategy).__name__} is not one of `balanced_dp`, `balanced_ddp`, `ddp_checkpoint` and `ddp_join`"
        )
    if isinstance(strategy, ExplicitDDPStrategy) and trainer.world_size == 1:
        raise ImpossibleError("there is one process")
    if not module.automatic_optimization:
        raise ImpossibleError("under manual optimization the step itself decides which gradients reach an optimizer")
    if takes_dataloader_iter(module, "training_step"):
        raise ImpossibleError(
            "`training_step(self, dataloader_iter)` fetches batches itself, so that no batch can be run again"
        )


def _compare_chunks(strategy: BalancedDataParallelStrategy, step: BatchReplay, batch: int) -> GradientRecord | None:
    """Compare the chunks of `balanced_dp` on the first device; return None for fewer than two chunks."""
    record, chunks, whole = strategy.last_batch, strategy.cut(step.batch), step.batch
    weighted = {index: weight for index, weight in enumerate(record.weights) if weight}
    if len(weighted) < 2:
        return None
    if record.skipped:
        whole = _join([chunks[index] for index in record.active], strategy.batch_dim, step.module.device)
    parts = [step.run(chunks[index], transferred=False).gradients for index in weighted]
    fit = GradientFit(step.run(whole, transferred=False).gradients, parts)
    sizes = [record.sizes[index] for index in weighted]
    return _record(fit, batch, [*weighted.values()], sizes, strategy.weight_by, step)


def _compare_ranks(strategy: ExplicitDDPStrategy, step: BatchReplay, batch: int) -> GradientRecord | None:
    """Compare the batches of the ranks, alike on every rank; return None if fewer than two have a weight."""
    assert strategy.reducer is not None
    group, weight, rank = strategy.reducer.process_group, strategy.batch_weight, strategy.global_rank
    data, samples = None, None
    with _raised_on_every_rank(group):
        given = step.batch
        if weight:
            samples = strategy.count_samples(given)
            data = _pack(given, samples, strategy.batch_dim)
    # Every rank sends, because only here do ranks learn which of them have a batch.
    weights, sizes, sent = zip(*gather_objects([weight, samples, data], group), strict=True)
    active = [index for index, weight in enumerate(weights) if weight]
    if len(active) < 2:
        return None

    own, of_whole = None, None
    with _raised_on_every_rank(group):
        if rank == active[0]:  # it runs the whole batch
            parts = [unpack(sent[index])[0] for index in active]
            of_whole = step.run(_join(parts, strategy.batch_dim, step.module.device)).gradients
        if weight:
            own = step.run(given).gradients
    # A collective of all ranks, after errors of any rank have been raised on all of them.
    step.draws, record = any(gather_objects(step.draws, group)), None
    found = gather_objects(own, group, active[0])
    if of_whole is not None:
        total = 1.0 if strategy.weight_by == "sum" else sum(weights)
        factors, counted = [weights[index] / total for index in active], [sizes[index] for index in active]
        fit = GradientFit(of_whole, [found[index] for index in active])
        record = asdict(_record(fit, batch, factors, counted, strategy.weight_by, step))
    return GradientRecord(**broadcast_object(record, group, active[0]))


def _pack(batch: Any, drawn: float | None, batch_dim: int) -> Tensor:
    """Serialise a batch for the first rank, which joins the batches by samples."""
    packed = pack(batch)
    if packed.skipped:
        raise ImpossibleError(f"batches hold {name_skipped(packed.skipped)}, which cannot be sent to another rank")
    with suppress(BatchSplitError):  # `_join` raises with the reason
        size = count_samples(batch, batch_dim)
        if size != drawn:
            raise ImpossibleError(
                f"the loader drew {drawn:g} samples for a batch whose size along `batch_dim={batch_dim}` is {size}, so"
                " that the batches of the ranks cannot be joined by samples. Set `batch_dim` to the dimension that"
                " counts samples, or `batch_size=None` in the `DataLoader` if its dataset makes whole batches"
            )
    return packed.data


def _join(batches: Sequence[Any], batch_dim: int, device: torch.device) -> Any:
    try:
        return to_device(join_batches(batches, batch_dim), device)
    except Exception as error:
        raise ImpossibleError(f"the parts cannot be joined: {describe_error(error)}") from error


def _find_remedy(comparison: GradientFit, sizes: Sequence[float | None], weight_by: WeightBy, step: BatchReplay) -> str:
    """Return the remedy for the cause that the best weights of the parts point at."""
    tolerance, fitted = step.tolerance, comparison.fitted
    choices = {"sum": [1.0] * len(sizes)}
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes):
        choices = {"samples": [size / sum(known) for size in known], **choices}
    for name, weights in choices.items():
        if name != weight_by and comparison.difference(weights) <= tolerance:
            return f'The gradient fits `weight_by="{name}"`: set it.'
    if fitted is not None and comparison.difference(fitted) <= tolerance and min(fitted) >= 0:
        if abs(sum(fitted) - 1) <= tolerance:
            return (
                f"It fits with the weights {_show(fitted)}: the loss is a mean over something other than samples, such"
                " as tokens that are not ignored, or a mean with class weights. Set `weight_by` to what this mean"
                ' divides by: `"tokens"`, `ClassWeights(weight)`, or a function that returns it.'
            )
        return (
            f"It fits with the weights {_show(fitted)}, which do not add up to 1: the loss is neither a mean nor a sum,"
            " such as the root of a mean. Return a mean or a sum."
        )
    if fitted is None and not math.isfinite(comparison.difference(choices["sum"])):
        return (
            "A gradient is not finite, as for a mean over nothing. Set `weight_by` to a function that returns"
            " 0 for a batch without anything to count."
        )
    if step.draws:
        return (
            "No weights fit. The step draws random numbers, others for each part than for the whole batch, which may"
            " be all there is to it. Draw them in the dataset, or switch them off, to check the rest."
        )
    if any(isinstance(part, BatchNorm) and part.training for part in step.module.modules()):
        return (
            "No weights fit. Batch normalisation computes with the statistics of each part. Use another normalisation,"
            " such as `GroupNorm`, or larger parts, if the difference matters."
        )
    return (
        "No weights fit: the forward pass mixes samples, as in-batch negatives do, or the loss has terms that are means"
        " over different things. `lightning-ddp-ext verify` names the line. Compute each sample's loss from this sample"
        " alone, and all means over the same things."
    )


def _show(weights: Sequence[float]) -> str:
    shown = ", ".join(f"{weight:.4g}" for weight in weights[:_SHOWN])
    return shown if len(weights) <= _SHOWN else f"{shown}, ..."


def _record(
    fit: GradientFit,
    batch: int,
    weights: list[float],
    sizes: Sequence[float | None],
    weight_by: WeightBy,
    step: BatchReplay,
) -> GradientRecord:
    """Return the record of parts with these weights and numbers of samples."""
    difference, (name, most) = fit.difference(weights), fit.worst(weights)
    remedy = None if difference <= step.tolerance else _find_remedy(fit, sizes, weight_by, step)
    fitted = None if fit.fitted is None else [*fit.fitted]
    return GradientRecord(batch, difference, name, most, step.tolerance, weights, fitted, remedy)

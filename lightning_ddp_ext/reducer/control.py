"""Values that ranks exchange in every synchronisation, and the message that carries them."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.consistency import compare_setups
from lightning_ddp_ext.errors import BatchSplitError, RanksOutOfStepError

_NUMBERS = 14  # of each rank, listed in `ControlMessage.write`
_BYTES = 8  # of a number
_DIFFERENT = -1


@dataclass(frozen=True, slots=True)
class ExchangedControl:
    """The control values of all ranks in one synchronisation, the same on every rank.

    Attributes:
        weights: Weight of each rank.
        stop: The largest `StepControl.stop` of any rank.
        has_next_batch: `StepControl.has_next_batch` of each rank.
        logged_keys: `StepControl.logged_keys` of each rank.
        timed: `StepControl.timed` of each rank.
        seconds: `StepControl.seconds` of each rank.
        most_samples: `StepControl.most_samples` of each rank.
        structures: For each rank, a number that identifies the names, types and shapes of its buffers.
        late: For each bucket, above 0 if a gradient came after the bucket had been sent on any rank.
        used: For each parameter, above 0 if it has a gradient on any rank.
        changed: For each buffer, above 0 if it has changed on any rank.
    """

    weights: Sequence[float]
    stop: int
    has_next_batch: Sequence[float]
    logged_keys: Sequence[float]
    timed: Sequence[float]
    seconds: Sequence[float]
    most_samples: Sequence[float]
    structures: Sequence[float]
    late: Sequence[float]
    used: Sequence[float]
    changed: Sequence[float]

    @property
    def total_weight(self) -> float:
        """Sum of the weights, added in the same order on every rank."""
        return sum(self.weights)

    @property
    def source(self) -> int:
        """The first rank with a weight above 0."""
        return next(rank for rank, weight in enumerate(self.weights) if weight > 0)


@dataclass(slots=True)
class StepControl:
    """Values that a rank sends with its gradients besides their weight. A plain loop rarely needs them.

    A rank sets its values before `GradientReducer.synchronize`, and reads the values of all ranks from `exchanged`
    afterwards. Values stay as they are until they are set again.

    Attributes:
        scale: Factor on the gradient of this rank; None for its weight.
        divisor: Divisor of the sum over the ranks, the same on all ranks; None for the sum of their weights.
        position: Position in the training, such as the number of the batch. Different positions are an error.
        describe_position: Function that puts a position into words, for this error.
        optimizer_steps: Number of optimizer steps so far. Different numbers are an error.
        optimizers: Number that depends on the steps and settings of each optimizer. Different numbers are an error.
        describe_settings: Yields descriptions of them for `compare_setups`; called on every rank if numbers differ.
        stop: Above 0 to ask all ranks to stop. The largest number of any rank is exchanged, so it may encode a reason.
        has_next_batch: 0 if this rank has no batch for the next step; else 1, or a number below 2 ** 53 by which ranks
            compare a batch that they share.
        logged_keys: Hash of the keys that this rank has logged in the step, a whole number below 2 ** 53.
        drawn: Hash of the samples that ranks have drawn for a batch that they share, of that size too. Different
            hashes are an error.
        loader_weights: For each micro-batch that has batches of several loaders, the weights of these batches on this
            rank. Other proportions on another rank or in another micro-batch are an error, since a rank has one weight.
        timed: Number of a step whose time is known by now, from 1; 0 for none.
        seconds: Time that this rank computed in that step; 0 if it had no sample or was not measured.
        most_samples: Most samples of a shared batch that this rank has memory for; -1 if that is not known.
        exchanged: The values of all ranks in the last synchronisation; None before the first.
    """

    scale: float | None = None
    divisor: float | None = None
    position: int = 0
    describe_position: Callable[[int], str] = "`control.position={}`".format
    optimizer_steps: int = 0
    optimizers: int = 0
    describe_settings: Callable[[], Iterable[Mapping[str, object]]] = tuple
    stop: int = 0
    has_next_batch: int = 0
    logged_keys: int = 0
    drawn: int = 0
    loader_weights: Sequence[Sequence[float]] = ()
    timed: int = 0
    seconds: float = 0.0
    most_samples: int = -1
    exchanged: ExchangedControl | None = None


class RankFindings(NamedTuple):
    """Findings of the reducer on one rank; the last three have one mark for each bucket, parameter and buffer."""

    weight: float
    synchronizations: int  # so far
    structure: int  # of its buffers, up to 53 bits
    late: bytearray
    used: bytearray
    changed: bytearray


class ControlMessage:
    """Writes the values of one rank to a tensor that ranks add up, and reads the sum.

    Each rank has a range of the tensor to itself, so that a sum holds the numbers of all ranks. In types of fewer than
    64 bits, a number is sent as its bytes: whole numbers up to 255, which bfloat16 and larger types represent exactly.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)

    def length(self, marks: int, dtype: torch.dtype) -> int:
        """Return the number of elements of a message in a type, with so many marks of buckets, parameters, buffers."""
        return _NUMBERS * (1 if dtype == torch.float64 else _BYTES) * self._world_size + marks

    @staticmethod
    def fits(dtype: torch.dtype) -> bool:
        """Return True if a type of numbers represents a message exactly."""
        return dtype.is_floating_point and torch.finfo(dtype).eps <= 2**-7  # 8 bits

    def write(self, found: RankFindings, control: StepControl, dtype: torch.dtype) -> Tensor:
        """Return the message of this rank."""
        marks = found.late + found.used + found.changed
        own = torch.tensor(
            [
                *(found.weight, found.synchronizations, found.structure),
                *(control.position, control.stop, control.has_next_batch, control.logged_keys, control.drawn),
                *(control.timed, control.seconds, control.most_samples, _proportions(control.loader_weights)),
                *(control.optimizer_steps, control.optimizers),
            ],
            dtype=torch.float64,
        )
        own = own if dtype == torch.float64 else own.view(torch.uint8)
        message = torch.zeros(self.length(len(marks), dtype), dtype=dtype)
        message[self._rank * own.numel() : (self._rank + 1) * own.numel()] = own
        if marks:
            message[-len(marks) :] = torch.frombuffer(marks, dtype=torch.uint8)
        return message

    def read(self, sums: Tensor, found: RankFindings, control: StepControl) -> ExchangedControl:
        """Read the sum of all messages, a CPU tensor; raise `RanksOutOfStepError` if ranks are at different steps."""
        of_ranks = self.length(0, sums.dtype)
        sent = sums[:of_ranks]
        sent = sent if sent.dtype == torch.float64 else sent.to(torch.uint8).view(torch.float64)
        columns = zip(*sent.reshape(self._world_size, _NUMBERS).tolist(), strict=True)
        weights, numbers, structures, positions, stops, has_next_batch, logged_keys, drawn, *measured = columns
        timed, seconds, most_samples, proportions, steps, optimizers = measured
        if len(set(numbers)) > 1:
            raise RanksOutOfStepError(
                f"rank {self._rank} makes its synchronisation {found.synchronizations} of gradients, others theirs of"
                f" number {_others(numbers, found.synchronizations)}. An error in a block of `synchronize` has to be"
                " raised on every rank, or end the run."
            )
        if len(set(positions)) > 1:
            raise RanksOutOfStepError(
                f"rank {self._rank} synchronises gradients at {control.describe_position(control.position)}, others at"
                f" {_others(positions, control.position, control.describe_position)}. Run equally many batches, and in"
                " each of them equally many synchronised backward passes, on every rank."
            )
        compare_steps(self._group, [*zip(steps, optimizers, strict=True)], control)
        if len(set(drawn)) > 1:
            other = next(rank for rank, number in enumerate(drawn) if number != drawn[0])
            raise RanksOutOfStepError(
                f"rank {other} has drawn other samples than rank 0 for the batch that they share. Use a sampler or a"
                " stream that draws alike on every rank, whatever else the rank does, or `ddp_join`."
            )
        if len({0.0, *proportions}) > 2 or _DIFFERENT in proportions:
            own = "; ".join(", ".join(f"{weight:g}" for weight in weights) for weights in control.loader_weights)
            first, *others = (proportions.index(one) for one in dict.fromkeys(proportions) if one)
            between = "micro-batches" if _DIFFERENT in proportions else f"ranks {first} and {others[0]}"
            raise BatchSplitError(
                f"rank {self._rank}: the loaders of a step give batches of the weights {own or 0}, in proportions that"
                f" differ between {between}, but a rank has one weight in a step.",
                "Give the loaders batch sizes in one proportion and `drop_last=True`, take a batch from each loader"
                " right before its `fabric.backward`, or set `fabric.strategy.batch_weight`.",
            )
        marks = iter(sums[of_ranks:].tolist())
        late, used, changed = (list(itertools.islice(marks, len(part))) for part in found[-3:])
        flags = list(has_next_batch)
        return ExchangedControl(
            weights, int(max(stops)), flags, logged_keys, timed, seconds, most_samples, structures, late, used, changed
        )


def compare_steps(group: dist.ProcessGroup, of_ranks: Sequence[Sequence[float]], control: StepControl) -> None:
    """Raise an error on all ranks if their `optimizer_steps` or `optimizers`, the pairs in `of_ranks`, differ."""
    if len({tuple(numbers) for numbers in of_ranks}) == 1:
        return
    rank, (steps, _) = dist.get_rank(group), zip(*of_ranks, strict=True)
    made = f"{steps[rank]:.0f} optimizer steps"
    if len(set(steps)) > 1:
        made += f", others {_others(steps, int(steps[rank]))}"
    else:
        for description in control.describe_settings():  # on every rank, as all have the same numbers
            compare_setups(description, group)
        made += ", as many as others, but not with the same optimizers"
    raise RanksOutOfStepError(
        f"rank {rank} has made {made}. Call `step` on all ranks or on none: decide by a value that is the same on every"
        " rank, such as the norm of synchronised gradients."
    )


def _proportions(rows: Sequence[Sequence[float]]) -> int:
    """Return a number above 0 for the proportions of weights in all rows; 0 if there are none."""
    # The hash of floats is the same in all processes.
    found = {1 + hash(tuple(weight / sum(row) for weight in row)) % 2**32 for row in rows if sum(row)}
    return _DIFFERENT if len(found) > 1 else sum(found)


def _others(numbers: Sequence[float], own: int, describe: Callable[[int], str] = str) -> str:
    return ", ".join(map(describe, sorted({int(number) for number in numbers} - {own})))

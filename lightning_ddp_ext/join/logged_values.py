"""What `self.log` does when ranks run in lockstep: the same keys and synchronised values on all of them."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_ddp_ext._compat.lightning_logging import (
    adopt_logged,
    current_results,
    describe_logged,
    is_synchronised,
    latest,
    set_latest,
)
from lightning_ddp_ext.distributed.exchange import gather_integer, gather_objects
from lightning_ddp_ext.errors import LoggedKeysError
from lightning_ddp_ext.join.lockstep_loader import StepParticipation
from lightning_ddp_ext.ranks.sample_counts import sums_and_means

_HASH_BITS = 31
_REDUCING = -1  # noted where a value is reduced outside of a step, by Lightning or by the user


class LoggedValues:
    """Synchronises what steps log with `sync_dist=True` after the step, all of it in one message.

    Lightning reduces each value when it is logged. Here the value of a step is set a little later, when the gradients
    of the step are synchronised or an evaluation step ends: with those, ranks compare the keys that they have logged.
    The mean over ranks is one by weight, as is that of the gradients.

    On a shadow step, the rank learns from an active one which keys there are. What hooks and callbacks log there does
    not count.

    Args:
        trainer: The Trainer.
        module: Its module.
        group: The ranks, over a backend for the module's device and for CPU tensors.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, group: dist.ProcessGroup) -> None:
        self._trainer = trainer
        self._module = module
        self._group = group
        self._participation: StepParticipation | None = None
        self._in_step = False
        self._is_logging = False
        self._logged: dict[str, Any] = {}  # in this step, by key
        self._pending: dict[str, Any] = {}
        self._adopted: set[str] = set()  # of this epoch, and not logged by this rank itself
        self._begins_evaluation = True  # ranks compare keys after the first batch, and when there are any

    def begin(self, participation: StepParticipation) -> None:
        """Begin a step, in which some ranks or all have data."""
        self._participation = participation
        self._logged.clear()
        self._pending.clear()

    def end(self) -> None:
        """End a step: what follows concerns no batch."""
        self._participation = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Put synchronisation off within the step of a LightningModule."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    @property
    def keys_hash(self) -> int:
        """Hash of the keys to synchronise, which has to be the same on all active ranks."""
        return _hash(self._pending)

    def reduce(self, tensor: Tensor, operation: str, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Reduce a value over ranks, or put that off.

        Args:
            tensor: The value.
            operation: `"mean"`, `"sum"`, `"max"` or `"min"`.
            reduce: Lightning's way to do it.
        """
        if self._is_logging and self._in_step:
            return tensor
        if (
            self._is_logging
            and self._participation is not None
            and self._participation.is_uneven
            and self._trainer.training
        ):
            return self._reduce_all([tensor], [operation], 1.0)[0]
        if not self._in_step and (self._participation is None or not self._participation.is_uneven):
            self._agree(_REDUCING)
        return reduce(tensor)

    def synchronize(self, weight: float, keys_hashes: Sequence[float] | None = None) -> None:
        """Synchronise the values that the step has logged so far; on every rank.

        `weight` is this rank's weight in means; a shadow step has none. `keys_hashes` are those of all ranks, if ranks
        have exchanged them already. Raises `LoggedKeysError` if ranks have logged different keys.
        """
        if keys_hashes is None and (self._pending or self._begins_evaluation):
            keys_hashes = gather_integer(self.keys_hash, self._group)
        self._begins_evaluation = self._trainer.training
        if keys_hashes is not None:
            active = range(len(keys_hashes)) if self._participation is None else self._participation.active
            self._compare([keys_hashes[rank] for rank in active])
        if not self._pending:
            return
        metrics = list(self._pending.values())
        operations = [metric.meta.sync.op for metric in metrics]
        values = [self._neutral(metric) if self._is_shadow else latest(metric) for metric in metrics]
        reduced = self._reduce_all(values, operations, weight)
        for metric, value in zip(metrics, reduced, strict=True):
            set_latest(metric, value)
        self._pending.clear()

    def describe(self) -> dict[str, Any]:
        """Describe the keys of this step for a rank that makes a shadow step, as JSON can hold it."""
        return {
            "logged": [describe_logged(key, metric) for key, metric in self._logged.items()],
            "pending": list(self._pending),
        }

    def adopt(self, message: Mapping[str, Any]) -> None:
        """Have the keys that another rank has described."""
        results = current_results(self._trainer)
        assert results is not None
        for logged in message["logged"]:
            metric = results.get(logged["key"])
            if metric is None or metric.has_reset:
                self._adopted.add(logged["key"])
            adopt_logged(results, logged, self._module, self._trainer.strategy.reduce)
        self._pending = {key: results[key] for key in message["pending"]}

    @property
    def _is_shadow(self) -> bool:
        return self._participation is not None and self._participation.is_shadow

    def update(self, key: str, metric: Any, proceed: Callable[[], None]) -> None:
        """Log a value as `proceed` does, and note its key if it is to be synchronised."""
        if self._is_shadow and metric.is_tensor:
            self._take_part(metric)
            metric.has_reset = False
            return
        self._is_logging = True
        try:
            proceed()
        finally:
            self._is_logging = False
        self._logged[key] = metric
        self._adopted.discard(key)
        if self._in_step and is_synchronised(metric, on_step=True):
            self._pending[key] = metric

    def _take_part(self, metric: Any) -> None:
        """Let a hook's value on a shadow step count nothing, where other ranks wait for it."""
        if is_synchronised(metric, on_step=True):
            set_latest(metric, self._reduce_all([self._neutral(metric)], [metric.meta.sync.op], 1.0)[0])

    def _neutral(self, metric: Any) -> Tensor:
        return torch.zeros_like(metric.value)

    def _reduce_all(self, values: Sequence[Tensor], operations: Sequence[str], weight: float) -> list[Tensor]:
        """Reduce values of any operations over ranks; those of a shadow step count nothing."""
        stacked = torch.stack([value.detach().double() for value in values])
        sums, means = sums_and_means(stacked, None if self._is_shadow else weight, self._add_up)
        signs = torch.tensor([-1.0 if name == "min" else 1.0 for name in operations], dtype=torch.float64)
        signs = signs.to(stacked.device)
        largest = torch.full_like(stacked, -torch.inf) if self._is_shadow else stacked * signs
        if any(name in ("max", "min") for name in operations):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        reduced = []
        for position, (value, name) in enumerate(zip(values, operations, strict=True)):
            if name in ("max", "min"):
                result = largest[position] * signs[position]
            else:
                result = means[position] if name == "mean" else sums[position]
            reduced.append(result.to(value.dtype))
        return reduced

    def _add_up(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def _compare(self, notes: Sequence[float]) -> None:
        """Refuse to go on if ranks have noted different things: they are about to reduce different values."""
        if len(set(notes)) > 1:
            keys = self._synchronised_keys()
            own = [key for key in keys if key not in self._adopted]
            _raise_difference(gather_objects((keys, own), self._group))

    def _agree(self, note: int) -> None:
        self._compare(gather_integer(note, self._group))

    def _synchronised_keys(self) -> list[str]:
        results: Mapping[str, Any] = current_results(self._trainer) or {}
        return [
            key
            for key, metric in results.items()
            if not metric.has_reset
            and (is_synchronised(metric, on_step=False) or is_synchronised(metric, on_step=True))
        ]

    def check_epoch(self) -> None:
        """See to it that no rank goes on while another waits with a value that a hook has logged there alone."""
        self._agree(_hash(sorted(self._synchronised_keys())))

    def end_epoch(self) -> bool:
        """Make all ranks reduce the same values of an epoch in the same order; return True if all have got there."""
        results = current_results(self._trainer)
        if results is None:
            return False
        self._begins_evaluation = True
        keys = self._synchronised_keys()
        notes = gather_integer(_hash(sorted(keys)) << 32 | _hash(keys), self._group)
        self._compare([note >> 32 for note in notes])
        self._adopted.difference_update(keys)
        if len(set(notes)) > 1:
            ordered = {key: results[key] for key in sorted(results)}
            results.clear()
            results.update(ordered)
        return True


def _hash(keys: Iterable[str]) -> int:
    joined = "\n".join(keys)
    return zlib.crc32(joined.encode()) >> (32 - _HASH_BITS) if joined else 0


def _raise_difference(of_ranks: Sequence[tuple[Sequence[str], Sequence[str]]]) -> None:
    """Name a key that some ranks have and others have not.

    Args:
        of_ranks: The keys of each rank, and those of them that it has logged itself.
    """
    loggers: dict[str, int] = {}
    for rank, (_, own) in enumerate(of_ranks):
        for key in own:
            loggers.setdefault(key, rank)
    for key, logger in loggers.items():
        missing = next((rank for rank, (keys, _) in enumerate(of_ranks) if key not in keys), None)
        if missing is not None:
            hook, _, name = key.partition(".")
            raise LoggedKeysError(
                f"rank {logger} logs `{name}` with `sync_dist=True` in `{hook}`, rank {missing} does not. Log the"
                " same keys on every rank, or leave `sync_dist` out."
            )
    raise LoggedKeysError(
        "ranks log with `sync_dist=True` at different times or in different orders. Log the same keys in the same order"
        " on every rank."
    )

"""Values of `self.log`, synchronised even if ranks have different numbers of batches."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext._compat.lightning_logging import (
    adopt_logged,
    current_results,
    describe_logged,
    is_synchronised,
    latest,
    set_latest,
)
from lightning_ddp_ext._devices import widest_float
from lightning_ddp_ext._lightning import LightningModule, Trainer
from lightning_ddp_ext.batches.sample_counts import sums_and_means
from lightning_ddp_ext.distributed.exchange import gather_integer, gather_objects
from lightning_ddp_ext.errors import LoggedKeysError
from lightning_ddp_ext.loaders.step_loader import Participation
from lightning_ddp_ext.reducer.control import ControlField

_REDUCING = -1  # sent in place of a hash when a value is reduced outside of a step, by Lightning or by the user


class LoggedValues:
    """Synchronises the values that steps log with `sync_dist=True`, all values of a step in one message.

    Ranks compare the keys of a step when they synchronise its gradients, or when an evaluation step ends, and then
    reduce the values. On a shadow step, a rank receives the keys from an active rank. Ranks that all have a batch in
    every step do not agree on anything else before they reduce values.
    """

    def __init__(self, trainer: Trainer, group: dist.ProcessGroup | None, agrees: bool, keys: ControlField) -> None:
        self._trainer = trainer
        self._module: LightningModule = trainer.lightning_module
        self._group = group
        self._agrees = agrees
        self._keys = keys
        self._participation: Participation | None = None  # None outside of batches, and if every rank has one
        self._in_step = False
        self._is_logging = False
        self.records: dict[str, Any] = {}  # records of this step by key
        self._pending: dict[str, Any] = {}  # records of this step whose values are not synchronised yet
        self._adopted: set[str] = set()  # keys of this epoch that only other ranks have logged
        self._begins_evaluation = True  # ranks compare keys after the first batch, then only when there are keys

    def begin(self, participation: Participation | None = None) -> None:
        """Begin a step, or the time between two steps, in which all ranks take part."""
        self._participation = participation if participation is not None and participation.is_uneven else None
        self.records.clear()
        self._pending.clear()

    @property
    def _is_shadow(self) -> bool:
        return self._participation is not None and self._participation.is_shadow

    @contextmanager
    def step(self) -> Iterator[None]:
        """Defer synchronisation in this block, which runs the step of a LightningModule."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def send_keys(self) -> None:
        """Send the keys to synchronise with the next control message; they have to be alike on all active ranks."""
        self._keys.value = _hash(self._pending)

    def reduce(self, tensor: Tensor, operation: str) -> Tensor | None:
        """Return a logged value as it is now, because `synchronize` reduces it; None if it has to be reduced now."""
        if self._is_logging and self._in_step:
            return tensor
        if self._is_logging and self._participation is not None and self._trainer.training:
            return self._reduce_all([tensor], [operation], 1.0)[0]
        if self._agrees and not self._in_step and self._participation is None:
            self._compare(gather_integer(_REDUCING, self._group))
        return None

    def synchronize(self, weight: float, is_compared: bool = False) -> None:
        """Synchronise the values that the step has logged so far. Call on every rank.

        `is_compared` says that the last control message has the keys of all ranks. The weight is ignored on a shadow
        step. Raises `LoggedKeysError` if ranks have logged different keys.
        """
        keys: Sequence[float] | None = self._keys.of_ranks if is_compared else None
        if keys is None and self._agrees and (self._pending or self._begins_evaluation):
            keys = gather_integer(_hash(self._pending), self._group)
        self._begins_evaluation = self._trainer.training
        if keys is not None:
            active = range(len(keys)) if self._participation is None else self._participation.active
            self._compare([keys[rank] for rank in active], list(self._pending))
        if not self._pending:
            return
        metrics = list(self._pending.values())
        operations = [metric.meta.sync.op for metric in metrics]
        values = [torch.zeros_like(one.value) if self._is_shadow else latest(one) for one in metrics]
        reduced = self._reduce_all(values, operations, weight)
        for metric, value in zip(metrics, reduced, strict=True):
            set_latest(metric, value)
        self._pending.clear()

    def describe(self) -> dict[str, Any]:
        """Return the keys of this step as JSON, for a rank that makes a shadow step."""
        return {
            # Values that are about to be synchronised need not be sent.
            "logged": [
                describe_logged(key, metric, with_value=key not in self._pending)
                for key, metric in self.records.items()
            ],
            "pending": list(self._pending),
        }

    def adopt(self, message: Mapping[str, Any]) -> None:
        """Add the keys that another rank has described."""
        results = current_results(self._trainer)
        assert results is not None
        for logged in message["logged"]:
            metric = results.get(logged["key"])
            if metric is None or metric.has_reset:
                self._adopted.add(logged["key"])
            adopt_logged(results, logged, self._module, self._trainer.strategy.reduce)
        self._pending = {key: results[key] for key in message["pending"]}

    @contextmanager
    def updating(self, key: str, metric: Any) -> Iterator[bool]:
        """Log a value in the block if this yields True, and note its key if it is to be synchronised."""
        if self._is_shadow and metric.is_tensor:
            if is_synchronised(metric, on_step=True):  # other ranks wait for the value of this hook
                value = torch.zeros_like(metric.value)
                set_latest(metric, self._reduce_all([value], [metric.meta.sync.op], 1.0)[0])
            metric.has_reset = False
            yield False
            return
        self._is_logging = True
        try:
            yield True
        finally:
            self._is_logging = False
        self.records[key] = metric
        self._adopted.discard(key)
        if self._in_step and is_synchronised(metric, on_step=True):
            self._pending[key] = metric

    def _reduce_all(self, values: Sequence[Tensor], operations: Sequence[str], weight: float) -> list[Tensor]:
        """Reduce each value over ranks by its own operation, without the values of shadow steps."""
        device = self._module.device
        own = [value.detach().to(device, widest_float(device), non_blocking=True) for value in values]
        stacked = torch.stack(own)
        # All keys in one message; `_compare` has ensured that ranks have the same keys in the same order.
        sums, means = sums_and_means(
            stacked, None if self._is_shadow else weight, partial(dist.all_reduce, group=self._group)
        )
        largest = torch.stack(
            [-one if operation == "min" else one for one, operation in zip(own, operations, strict=True)]
        )
        if self._is_shadow:
            largest.fill_(-torch.inf)
        if not {"max", "min"}.isdisjoint(operations):
            # A second message, because one all-reduce has one operation; minima travel as negative maxima.
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        reduced = {"sum": sums, "mean": means, "max": largest, "min": -largest}
        return [
            reduced[operation][position].to(value)
            for position, (value, operation) in enumerate(zip(values, operations, strict=True))
        ]

    def _compare(self, hashes: Sequence[float], keys: Sequence[str] | None = None) -> None:
        """Raise if ranks are about to reduce different values, of these keys or of all keys of the epoch."""
        if len(set(hashes)) > 1:
            keys = self._synchronised_keys() if keys is None else keys
            own = [key for key in keys if key not in self._adopted]
            _raise_difference(gather_objects((keys, own), self._group))

    def _synchronised_keys(self) -> list[str]:
        results: Mapping[str, Any] = current_results(self._trainer) or {}
        return [
            key
            for key, metric in results.items()
            if not metric.has_reset
            and (is_synchronised(metric, on_step=False) or is_synchronised(metric, on_step=True))
        ]

    def check_epoch(self) -> None:
        """Raise if a hook has logged a value on some ranks only, before other ranks continue without them."""
        if self._agrees:
            self._compare(gather_integer(_hash(sorted(self._synchronised_keys())), self._group))

    def end_epoch(self) -> None:
        """Make all ranks reduce the same values of an epoch in the same order."""
        results = current_results(self._trainer)
        if results is None or not self._agrees:
            return
        self._begins_evaluation = True
        keys = self._synchronised_keys()
        # Lightning reduces the values one by one, in the order in which each rank has logged them first.
        hashes = gather_integer(_hash(sorted(keys)) << 32 | _hash(keys), self._group)
        self._compare([both >> 32 for both in hashes])
        self._adopted.difference_update(keys)
        if len(set(hashes)) > 1:
            ordered = {key: results[key] for key in sorted(results)}
            results.clear()
            results.update(ordered)


def _hash(keys: Iterable[str]) -> int:
    return zlib.crc32("\n".join(keys).encode()) >> 1  # 31 bits, so that two of them make a signed integer


def _raise_difference(of_ranks: Sequence[tuple[Sequence[str], Sequence[str]]]) -> None:
    """Name a key that not all ranks have; each rank gives its keys, and the keys that it has logged itself."""
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

"""Values of `self.log` and states of metrics, synchronised even if ranks have different numbers of batches."""

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_ddp_ext._compat.lightning_loops import (
    adopt_logged,
    current_results,
    describe_logged,
    is_synchronised,
    latest,
    set_latest,
)
from lightning_ddp_ext._compat.torchmetrics import Gather, list_states, tensor_states
from lightning_ddp_ext._devices import widest_float
from lightning_ddp_ext.distributed.exchange import add_up, gather_different, gather_integer, gather_objects
from lightning_ddp_ext.errors import LoggedKeysError, UnsupportedFeatureError
from lightning_ddp_ext.loaders.step_loader import StepParticipation
from lightning_ddp_ext.ranks.sample_counts import sums_and_means

_REDUCING = -1  # sent in place of a hash when a value is reduced outside of a step, by Lightning or by the user


@dataclass(eq=False)
class LoggedValues:
    """Synchronises the values that steps log with `sync_dist=True`, all values of a step in one message.

    Ranks compare the keys of a step when they synchronise its gradients, or when an evaluation step ends, and then
    reduce the values. On a shadow step, a rank receives the keys from an active rank.
    """

    trainer: Trainer
    module: LightningModule
    group: dist.ProcessGroup
    participation: Callable[[], StepParticipation]  # returns the present one

    def __post_init__(self) -> None:
        self._in_step = False
        self._is_logging = False
        self._logged: dict[str, Any] = {}  # records of this step by key
        self._pending: dict[str, Any] = {}  # records of this step whose values are not synchronised yet
        self._adopted: set[str] = set()  # keys of this epoch that only other ranks have logged
        self._begins_evaluation = True  # ranks compare keys after the first batch, then only when there are keys

    def begin(self) -> None:
        """Begin a step, or the time between two steps, in which all ranks take part."""
        self._logged.clear()
        self._pending.clear()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Defer synchronisation in this block, which runs the step of a LightningModule."""
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
        """Reduce a value over ranks with Lightning's own `reduce`, or defer that to `synchronize`."""
        if self._is_logging and self._in_step:
            return tensor
        if self._is_logging and self.participation().is_uneven and self.trainer.training:
            return self._reduce_all([tensor], [operation], 1.0)[0]
        if not self._in_step and not self.participation().is_uneven:
            self._compare(gather_integer(_REDUCING, self.group))
        return reduce(tensor)

    def synchronize(self, weight: float, keys_hashes: Sequence[float] | None = None) -> None:
        """Synchronise the values that the step has logged so far. Call on every rank.

        `keys_hashes` are the hashes of all ranks, if they were exchanged with the gradients; the weight is ignored
        on a shadow step. Raises `LoggedKeysError` if ranks have logged different keys.
        """
        if keys_hashes is None and (self._pending or self._begins_evaluation):
            keys_hashes = gather_integer(self.keys_hash, self.group)
        self._begins_evaluation = self.trainer.training
        if keys_hashes is not None:
            self._compare([keys_hashes[rank] for rank in self.participation().active], list(self._pending))
        if not self._pending:
            return
        metrics = list(self._pending.values())
        operations = [metric.meta.sync.op for metric in metrics]
        values = [torch.zeros_like(one.value) if self.participation().is_shadow else latest(one) for one in metrics]
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
                for key, metric in self._logged.items()
            ],
            "pending": list(self._pending),
        }

    def adopt(self, message: Mapping[str, Any]) -> None:
        """Add the keys that another rank has described."""
        results = current_results(self.trainer)
        assert results is not None
        for logged in message["logged"]:
            metric = results.get(logged["key"])
            if metric is None or metric.has_reset:
                self._adopted.add(logged["key"])
            adopt_logged(results, logged, self.module, self.trainer.strategy.reduce)
        self._pending = {key: results[key] for key in message["pending"]}

    def update(self, key: str, metric: Any, proceed: Callable[[], None]) -> None:
        """Log a value as `proceed` does, and note its key if it is to be synchronised."""
        if self.participation().is_shadow and metric.is_tensor:
            if is_synchronised(metric, on_step=True):  # other ranks wait for the value of this hook
                value = torch.zeros_like(metric.value)
                set_latest(metric, self._reduce_all([value], [metric.meta.sync.op], 1.0)[0])
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

    def _reduce_all(self, values: Sequence[Tensor], operations: Sequence[str], weight: float) -> list[Tensor]:
        """Reduce each value over ranks by its own operation, without the values of shadow steps."""
        device = self.module.device
        own = [value.detach().to(device, widest_float(device), non_blocking=True) for value in values]
        stacked = torch.stack(own)
        sums, means = sums_and_means(
            stacked, None if self.participation().is_shadow else weight, partial(add_up, group=self.group)
        )
        largest = torch.stack(
            [-one if operation == "min" else one for one, operation in zip(own, operations, strict=True)]
        )
        if self.participation().is_shadow:
            largest.fill_(-torch.inf)
        if not {"max", "min"}.isdisjoint(operations):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
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
            _raise_difference(gather_objects((keys, own), self.group))

    def _synchronised_keys(self) -> list[str]:
        results: Mapping[str, Any] = current_results(self.trainer) or {}
        return [
            key
            for key, metric in results.items()
            if not metric.has_reset
            and (is_synchronised(metric, on_step=False) or is_synchronised(metric, on_step=True))
        ]

    def check_epoch(self) -> None:
        """Raise if a hook has logged a value on some ranks only, before other ranks continue without them."""
        self._compare(gather_integer(_hash(sorted(self._synchronised_keys())), self.group))

    def end_epoch(self) -> bool:
        """Make all ranks reduce the same values of an epoch in the same order; return True if all have got there."""
        results = current_results(self.trainer)
        if results is None:
            return False
        self._begins_evaluation = True
        keys = self._synchronised_keys()
        hashes = gather_integer(_hash(sorted(keys)) << 32 | _hash(keys), self.group)
        self._compare([both >> 32 for both in hashes])
        self._adopted.difference_update(keys)
        if len(set(hashes)) > 1:
            ordered = {key: results[key] for key in sorted(results)}
            results.clear()
            results.update(ordered)
        return True


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


_NO_TENSOR = "no tensor"
_NOTHING: tuple[int, str, list[int], str] = (0, "", [], "")


def synchronize_states(
    metric: Metric, synchronize: Callable[[Gather], None], gather: Gather, group: dist.ProcessGroup | None
) -> None:
    """Synchronise a metric's states with the same collectives on all ranks, however many updates each rank has made.

    `synchronize` is torchmetrics' own function, which gathers as many entries as this rank has, in its shape and dtype.
    So lists are padded to the longest list and the padding is dropped from the result; states take the shape of ranks
    that have made an update, and a dtype that holds the values of all ranks.
    """
    tensors, lists = tensor_states(metric), list_states(metric)
    own = {
        "is_updated": metric.update_count > 0,
        "tensors": {name: _describe([value]) for name, value in tensors.items()},
        "lists": {name: _describe(entries) for name, entries in lists.items()},
    }
    of_ranks = gather_different(own, group)
    if len(of_ranks) == 1:  # all ranks have the same
        synchronize(gather)
        return
    for name, value in tensors.items():
        forms = [None if row is None else (row["is_updated"], *row["tensors"][name]) for row in of_ranks]
        setattr(metric, name, _in_common_form(value, forms, f"`{name}` of `{type(metric).__name__}`"))
    owners: dict[int, list[int]] = {}  # ranks, by the identity of an entry
    for name, entries in lists.items():
        described = [_NOTHING if row is None else row["lists"][name] for row in of_ranks]
        numbers = [number for number, *_ in described]
        _, dtype, shape, device_type = max(described, key=lambda each: each[0])
        if dtype == _NO_TENSOR:
            if len(set(numbers)) > 1:
                raise UnsupportedFeatureError(
                    f"`{type(metric).__name__}` keeps {min(numbers)} to {max(numbers)} entries of `{name}` on ranks 0"
                    f" to {len(numbers) - 1}, which torchmetrics can gather only if all ranks have equally many. Keep"
                    " tensors in its states, or give all ranks equally many samples to evaluate."
                )
            continue
        device = metric.device if metric.device.type == device_type else torch.device(device_type or "cpu")
        common = _common_dtype([dtype for number, dtype, *_ in described if number])
        # Each entry another object, since `owners` refers to identities.
        filled = [entry.to(common).view_as(entry) for entry in entries]
        while len(filled) < max(numbers):
            size = [0, *shape[1:]] if shape else []  # gathering needs equally many dimensions on all ranks
            filled.append(torch.zeros(size, dtype=common, device=device))
        for position, entry in enumerate(filled):
            owners[id(entry)] = [rank for rank, number in enumerate(numbers) if number > position]
        setattr(metric, name, filled)

    def gather_entries(tensor: Tensor, group: Any | None = None) -> list[Tensor]:
        gathered = gather(tensor, group=group)
        return [gathered[rank] for rank in owners.get(id(tensor), range(len(gathered)))]

    synchronize(gather_entries)


def _describe(entries: Sequence[Any]) -> tuple[int, str, list[int], str]:
    """Return the number of entries, the dtype that holds all of them, and shape and device type of the first one."""
    if not entries:
        return _NOTHING
    if not all(isinstance(entry, Tensor) for entry in entries):
        return len(entries), _NO_TENSOR, [], ""
    first = entries[0]
    dtype = functools.reduce(torch.promote_types, (entry.dtype for entry in entries))
    return len(entries), str(dtype).removeprefix("torch."), list(first.shape), first.device.type


def _common_dtype(names: Sequence[str]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (getattr(torch, name) for name in names), torch.bool)


def _in_common_form(value: Tensor, described: Sequence[Any], state: str) -> Tensor:
    """Return a state in a common form, given for each rank whether it has made an update, and `_describe` of it."""
    rows = [row for row in described if row is not None]
    made = [shape for is_updated, _, _, shape, _ in rows if is_updated] or [shape for _, _, _, shape, _ in rows]
    shape = made[0]
    if any(other != shape for other in made) or not all(_can_become(row[3], shape) for row in rows):
        shapes = ", ".join("none" if row is None else str(row[3]) for row in described)
        raise UnsupportedFeatureError(
            f"{state} has the shapes {shapes} on ranks 0 to {len(described) - 1}, which cannot be combined. Give"
            " states that differ between ranks the default `[]`, and `dist_reduce_fx='cat'`."
        )
    return value.to(_common_dtype([dtype for _, _, dtype, _, _ in rows])).expand(shape).contiguous()


def _can_become(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if a tensor of one shape can be expanded to another."""
    return len(shape) <= len(other) and all(
        own in (1, wanted) for own, wanted in zip(reversed(shape), reversed(other), strict=False)
    )

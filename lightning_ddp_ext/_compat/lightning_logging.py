"""Private names of Lightning behind `self.log`. Checked on lightning 2.6.6."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor


def current_results(trainer: Trainer) -> _ResultCollection | None:
    """Return the results that `self.log` adds to at the moment."""
    return trainer._results


def watch_logging(
    trainer: Trainer,
    update: Callable[[str, _ResultMetric, Callable[[], None]], None],
    count: Callable[[Any], int | None],
    end_batch: Callable[[], None],
    end_epoch: Callable[[], None] = lambda: None,
    reduced: Callable[[], None] = lambda: None,
) -> None:
    """Intercept logging in every loop.

    `update` replaces each update, and gets the key, the record and the original function. `count` returns the number
    of samples of a batch, or None for Lightning's own count; an explicit `batch_size` wins. `end_batch` runs after the
    last hook of a batch, `end_epoch` before any hook sees the values of an epoch, `reduced` after their reduction.
    """
    for results in _result_collections(trainer):
        _watch(results, update)
        _count_batches(results, count)
    connector = trainer._logger_connector
    _surround(connector, "on_batch_end", before=end_batch)
    _surround(connector, "epoch_end_reached", before=end_epoch)
    _surround(connector, "on_epoch_end", after=reduced)


def _surround(
    owner: Any, name: str, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> None:
    original = getattr(type(owner), name).__get__(owner)

    def method() -> None:
        before()
        original()
        after()

    setattr(owner, name, method)


def _watch(results: _ResultCollection, update: Callable[[str, _ResultMetric, Callable[[], None]], None]) -> None:
    def update_metrics(key: str, value: Any, batch_size: int) -> None:
        update(key, results[key], lambda: _ResultCollection.update_metrics(results, key, value, batch_size))

    results.update_metrics = update_metrics


def _count_batches(results: _ResultCollection, count: Callable[[Any], int | None]) -> None:
    def extract_batch_size(metric: _ResultMetric, batch_size: int | None, meta: _Metadata) -> int:
        if batch_size is None and results.batch_size is None and results.batch is not None:
            results.batch_size = count(results.batch)  # until the end of the batch
        return _ResultCollection._extract_batch_size(results, metric, batch_size, meta)

    vars(results)["_extract_batch_size"] = extract_batch_size


def unwatch_logging(trainer: Trainer) -> None:
    """Undo `watch_logging`."""
    for results in _result_collections(trainer):
        for name in ("update_metrics", "_extract_batch_size"):
            results.__dict__.pop(name, None)
    for name in ("on_batch_end", "epoch_end_reached", "on_epoch_end"):
        trainer._logger_connector.__dict__.pop(name, None)


def is_synchronised(metric: _ResultMetric, *, on_step: bool) -> bool:
    """Return True if Lightning reduces a logged value over all ranks, in the step or at the end of the epoch."""
    sync = metric.meta.sync
    wanted = metric.meta.on_step if on_step else metric.meta.on_epoch
    return bool(metric.is_tensor and wanted and sync.should and not sync.rank_zero_only and sync.group is None)


def set_latest(metric: _ResultMetric, value: Tensor) -> None:
    """Set the value that was logged in the last step."""
    metric._forward_cache = value
    if not metric.meta.on_epoch:
        metric.value = value


def latest(metric: _ResultMetric) -> Tensor:
    """Return the value that was logged in the last step."""
    value = metric._forward_cache
    assert isinstance(value, Tensor)
    return value


def describe_logged(key: str, metric: _ResultMetric, *, with_value: bool) -> dict[str, Any]:
    """Describe a logged value for another rank, as JSON types; the host waits for the value."""
    meta = {
        field.name: getattr(metric.meta, field.name)
        for field in dataclasses.fields(_Metadata)
        if field.name not in ("_sync", "reduce_fx")
    }
    cache = metric._forward_cache if with_value else None
    return {
        "key": key,
        "meta": meta,
        "reduce_fx": metric.meta.reduce_fx.__name__,
        "sync": [metric.meta.sync.should, metric.meta.sync.rank_zero_only],
        "is_tensor": metric.is_tensor,
        "dtype": _name(metric.value.dtype) if metric.is_tensor else None,
        "latest": (cache.item(), _name(cache.dtype)) if isinstance(cache, Tensor) and cache.numel() == 1 else None,
        "is_shared": not metric.is_tensor and metric.value.dist_sync_on_step,
    }


def adopt_logged(
    results: _ResultCollection, described: dict[str, Any], module: LightningModule, sync: Callable[..., Any]
) -> None:
    """Add a value that only another rank has logged, from its `describe_logged`; `sync` reduces it."""
    key = described["key"]
    metric = results.get(key)
    if metric is None:
        should, rank_zero_only = described["sync"]
        meta = _Metadata(**described["meta"], reduce_fx=getattr(torch, described["reduce_fx"]))
        meta.sync = _Sync(fn=sync, _should=should, rank_zero_only=rank_zero_only)
        metric = results[key] = _ResultMetric(meta, described["is_tensor"])
        metric.to(module.device)
    if metric.is_tensor:
        metric.value = metric.value.to(getattr(torch, described["dtype"]))
    elif metric.meta.metric_attribute is not None:
        metric.value = module.get_submodule(metric.meta.metric_attribute)
    metric._computed = None  # a rank with a cached value would skip the reduction that other ranks run
    if described["latest"] is not None and (metric._forward_cache is None or described["is_shared"]):
        value, dtype = described["latest"]
        metric._forward_cache = torch.tensor(value, dtype=getattr(torch, dtype), device=module.device)
    metric.has_reset = False


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _result_collections(trainer: Trainer) -> Iterator[_ResultCollection]:
    yield trainer.fit_loop.epoch_loop._results
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        yield loop._results

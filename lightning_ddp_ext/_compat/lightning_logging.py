"""Private names of Lightning's logged values. Checked on lightning 2.6.6."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext._compat.lightning import replace_attributes
from lightning_ddp_ext._compat.lightning_names import _Metadata, _ResultCollection, _ResultMetric, _Sync
from lightning_ddp_ext._lightning import LightningModule, Trainer


def logs_now(trainer: Trainer) -> bool:
    """Return True if loggers get the values of this step."""
    return trainer._logger_connector.should_update_logs


def current_results(trainer: Trainer) -> _ResultCollection | None:
    """Return the results that `self.log` adds to at the moment."""
    return trainer._results


def set_logged_batch(trainer: Trainer, batch: Any) -> None:
    """Let `self.log` count the samples of another batch."""
    results = trainer._results
    if results is not None:
        results.batch, results.batch_size = batch, None


def logged_in_step(records: Mapping[str, _ResultMetric]) -> dict[str, Tensor]:
    """Return the values that were logged last with `on_step`, by key."""
    in_step = {key: one._forward_cache for key, one in records.items() if one.is_tensor and one.meta.on_step}
    return {key: value for key, value in in_step.items() if isinstance(value, Tensor)}


def watch_logging(
    cleanup: ExitStack,
    trainer: Trainer,
    updating: Callable[[str, _ResultMetric], AbstractContextManager[bool]],
    count: Callable[[Any], int | None],
    end_batch: Callable[[], None],
    end_epoch: Callable[[], None] = lambda: None,
    reduced: Callable[[], None] = lambda: None,
) -> None:
    """Intercept logging in every loop until `cleanup` closes.

    Each update runs in the context of `updating(key, record)`, if that yields True. `count` returns the number of
    samples of a batch, or None for Lightning's own count; an explicit `batch_size` wins. `end_batch` runs after the
    last hook of a batch, `end_epoch` before any hook sees the values of an epoch, `reduced` after their reduction.
    """
    fit_loop = trainer.fit_loop
    for loop in (fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        _watch(cleanup, loop._results, updating, count)
    connector = trainer._logger_connector

    def surround(name: str, before: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
        original = getattr(type(connector), name).__get__(connector)

        def method() -> None:
            before()
            original()
            after()

        replace_attributes(cleanup, connector, **{name: method})

    surround("on_batch_end", end_batch)
    surround("epoch_end_reached", end_epoch)
    surround("on_epoch_end", lambda: None, reduced)


def _watch(
    cleanup: ExitStack,
    results: _ResultCollection,
    updating: Callable[[str, _ResultMetric], AbstractContextManager[bool]],
    count: Callable[[Any], int | None],
) -> None:
    def update_metrics(key: str, value: Any, batch_size: int) -> None:
        with updating(key, results[key]) as is_own:
            if is_own:
                _ResultCollection.update_metrics(results, key, value, batch_size)

    def extract_batch_size(metric: _ResultMetric, batch_size: int | None, meta: _Metadata) -> int:
        if batch_size is None and results.batch_size is None and results.batch is not None:
            results.batch_size = count(results.batch)  # until the end of the batch
        return _ResultCollection._extract_batch_size(results, metric, batch_size, meta)

    replace_attributes(cleanup, results, update_metrics=update_metrics, _extract_batch_size=extract_batch_size)


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

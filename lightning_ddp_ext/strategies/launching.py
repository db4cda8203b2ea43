"""The run of one rank, and what passes between it and the process that has started it."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_ddp_ext._compat.lightning import keep_predictions, start_method_of
from lightning_ddp_ext._lightning import Callback, ParallelStrategy, TrainerFn, rank_zero_warn
from lightning_ddp_ext.batches.containers import items
from lightning_ddp_ext.distributed.serialization import name_skipped, pack, unpack
from lightning_ddp_ext.steps.trainer_watchdog import TrainerWatchdog


def run_on_rank(strategy: ParallelStrategy, watch: TrainerWatchdog, run: Callable[[], Any]) -> Any:
    """Run a function of the Trainer on this rank; predictions for the process that has started it are a file."""
    is_started = start_method_of(strategy) != "popen"
    if is_started:
        keep_predictions(strategy)
    with watch.explaining():
        results = run()
    module = strategy.lightning_module
    if not is_started or results is None or module is None or module.trainer.state.fn != TrainerFn.PREDICTING:
        return results
    packed = pack(results)
    if packed.skipped:
        rank_zero_warn(
            f"`trainer.predict` returns None: predictions hold {name_skipped(packed.skipped)}, which cannot be sent"
            " to the process that has started this one. Return tensors and plain values from `predict_step`."
        )
        return None
    if strategy.local_rank:
        return None
    # The other process reads the queue when this one has ended: a pipe would be full, shared memory be gone.
    with tempfile.NamedTemporaryFile(delete=False) as file:
        torch.save(packed.data, file)
    return Path(file.name)


def receive_predictions(results: Any) -> Any:
    """Return the predictions in a file that rank 0 has left, or other results of a Trainer as they are."""
    if not isinstance(results, Path):
        return results
    data = torch.load(results, weights_only=True)
    results.unlink()
    return unpack(data)[0]


def unshare(parts: Sequence[object]) -> None:
    """Give the tensors of modules and callbacks memory of this process, which no other rank changes."""
    values, seen, storages = [*parts], set[int](), dict[int, torch.UntypedStorage]()
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.is_shared():  # type: ignore[no-untyped-call]
            shared = value.untyped_storage()
            if shared.data_ptr() not in storages:
                storages[shared.data_ptr()] = shared.clone()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                value.set_(storages[shared.data_ptr()], value.storage_offset(), value.size(), value.stride())
        values += vars(value).values() if isinstance(value, Module | Callback) else (one for _, one in items(value))

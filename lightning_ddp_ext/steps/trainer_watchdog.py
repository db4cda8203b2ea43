"""The watchdog of a strategy with one process per device, over the ranks of a Trainer."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp_ext._compat.lightning import is_exit, is_planned_end
from lightning_ddp_ext._compat.torch import cloned_store, is_lost_connection
from lightning_ddp_ext._lightning import RunningStage, Trainer, TrainerFn
from lightning_ddp_ext._validation import as_timeout
from lightning_ddp_ext.distributed.backends import connects_without_store
from lightning_ddp_ext.distributed.watchdog import Interruption, RunWatch
from lightning_ddp_ext.errors import DDPExtError

_PHASES = {
    RunningStage.TRAINING: "training",
    RunningStage.SANITY_CHECKING: "sanity check",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "prediction",
}

# Number of the run in this process; the same on every rank, since all ranks make the same runs.
_numbers = itertools.count()


class TrainerWatchdog:
    """Ends the run on every rank if one of them fails, exits, or gives no sign of life for `limit`."""

    def __init__(self, limit: timedelta | float | None) -> None:
        self.limit = None if limit is None else as_timeout("stall_timeout", limit)
        self.has_exited = False  # this rank ends the run with `sys.exit()`, maybe alone
        self._watch: RunWatch | None = None

    def start(self, trainer: Trainer) -> None:
        """Start to watch the other ranks, if any; after the process group has been made."""
        self.stop()
        self.has_exited = False
        number = next(_numbers)
        if trainer.world_size == 1 or not dist.is_initialized() or connects_without_store(dist.get_backend()):
            return
        group, device = dist.group.WORLD, trainer.strategy.root_device
        assert group is not None
        self._watch = RunWatch(
            dist.PrefixStore(f"watch/{number}", cloned_store(group)),
            dist.get_rank(),
            dist.get_world_size(),
            None if self.limit is None else self.limit.total_seconds(),
            lambda: _describe_progress(trainer),
            lambda: _finalize(trainer),
            None if device.type == "cpu" else partial(torch.accelerator.synchronize, device),
        )
        self._watch.start()

    def stop(self) -> None:
        """Stop watching, at the end of the run."""
        if self._watch is not None:
            self._watch.stop()
        self._watch = None

    def failure(self) -> str | None:
        """Return the first failure reported by any rank, or None."""
        return None if self._watch is None else self._watch.failure

    def others_come(self) -> bool:
        """Return True if this rank may wait for the others: after no failure, and unless this rank exits alone."""
        return self.failure() is None and not self.has_exited

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Report an error in a block to the other ranks; raise `OtherRankError` if another rank is the cause."""
        try:
            yield
        except BaseException as error:
            watch = self._watch
            if watch is None or is_planned_end(error):
                raise
            self.has_exited = is_exit(error)
            if self.has_exited:
                raise
            if isinstance(error, Interruption) or (is_lost_connection(error) and not isinstance(error, DDPExtError)):
                raise watch.explain(error) from error
            watch.fail(error)
            raise


def _describe_progress(trainer: Trainer) -> Mapping[str, Any]:
    """Return the step and the phase of a run, in words; it may be called from any thread."""
    stage = trainer.state.stage
    phase = _PHASES.get(stage, "set-up") if stage is not None else "set-up"
    if stage == RunningStage.TRAINING:
        index = trainer.fit_loop.epoch_loop.batch_idx
        phase += f", batch {index}" if index >= 0 else ", before batch 0"
    elif stage is not None and stage.evaluating:
        loop = trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == TrainerFn.FITTING else trainer.validate_loop
        loop = trainer.test_loop if stage == RunningStage.TESTING else loop
        phase += f", batch {max(0, loop.batch_progress.current.ready - 1)}"
    if getattr(trainer.strategy, "is_shadow", False):
        phase += ", shadow step"
    driver = getattr(trainer.strategy, "driver", None)
    gradient = None if driver is None else driver.gradient
    return {"step": trainer.global_step, "phase": phase, "awaits": "" if gradient is None else gradient.awaits}


def _finalize(trainer: Trainer) -> None:
    for logger in trainer.loggers:
        with contextlib.suppress(Exception):  # the process ends in any case
            logger.finalize("failed")

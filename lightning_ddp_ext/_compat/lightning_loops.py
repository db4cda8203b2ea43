"""Private names of Lightning's loops: batches, signals, exact resume. Checked on lightning 2.6.6."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from lightning_ddp_ext._compat.lightning import is_hook_of_loop, replace_attributes
from lightning_ddp_ext._lightning import PossibleUserWarning, Trainer


def leaves_out_backward(trainer: Trainer) -> bool:
    """Return True if training steps run without a backward pass, as for statistics of averaged weights."""
    return bool(trainer.fit_loop._skip_backward)


def replace_signal_handling(cleanup: ExitStack, trainer: Trainer, register: Callable[[], None]) -> None:
    """Replace Lightning's signal handlers, which communicate and save; call before they are registered."""
    connector = trainer._signal_connector

    def register_handlers() -> None:
        connector.received_sigterm = False
        connector._original_handlers = connector._get_current_signal_handlers()
        register()

    replace_attributes(cleanup, connector, register_signal_handlers=register_handlers)
    # Lightning would run a collective before every batch.
    replace_attributes(cleanup, trainer.fit_loop.epoch_loop, _broadcast_sigterm_tensor=lambda: None)


def before_each_batch(cleanup: ExitStack, trainer: Trainer, action: Callable[[], bool]) -> None:
    """Call `action` before each training batch is fetched; if it returns False, no batch is fetched.

    There is no public hook at this point, after validation and after everything else about the previous batch.
    """
    loop = trainer.fit_loop.epoch_loop
    original = type(loop).advance.__get__(loop)

    def advance(data_fetcher: Any) -> None:
        if action():
            original(data_fetcher)

    replace_attributes(cleanup, loop, advance=advance)


def preemption_path(trainer: Trainer) -> str:
    """Return the path where Lightning looks for the checkpoint of a preempted run, `ckpt_path="hpc"`."""
    return trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)


def manual_step_progress(trainer: Trainer) -> Any:
    """Return the counter of optimizer steps under manual optimization, which `trainer.global_step` reads."""
    return trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress


@contextmanager
def without_batch_hooks(trainer: Trainer) -> Iterator[None]:
    """Call no batch hooks of evaluation in this block."""
    # The callbacks stay in place, because Lightning calls their `on_exception` if an error ends the block.
    hooked = {id(one): one for one in (trainer.lightning_module, *vars(trainer)["callbacks"])}  # each once
    owners = [vars(one) for one in hooked.values()]
    names = [f"on_{stage}_batch_{end}" for stage in ("validation", "test", "predict") for end in ("start", "end")]
    kept = [{name: owner[name] for name in names if name in owner} for owner in owners]
    for owner in owners:
        owner.update(dict.fromkeys(names, lambda *_: None))
    try:
        yield
    finally:
        for owner, own in zip(owners, kept, strict=True):
            for name in names:
                del owner[name]
            owner.update(own)


@dataclass(frozen=True)
class Progress:
    """Position of the training loop when a checkpoint was saved."""

    # The last completed unit: a "batch" with everything after it, a "step" without a validation that may be due, that
    # "validation", or an "epoch" except for its last hooks. None: anything else, such as a part of a batch.
    done: Literal["batch", "step", "validation", "epoch"] | None
    is_last_batch: bool

    @property
    def is_after_batch(self) -> bool:
        """Whether the work after a batch comes next."""
        return self.done in ("step", "validation")

    @property
    def ends_epoch(self) -> bool:
        """Whether no batch of the epoch comes next."""
        return self.done == "epoch" or (self.is_after_batch and self.is_last_batch)


def find_progress(trainer: Trainer) -> Progress:
    """Return the position of the training loop, in a hook that saves a checkpoint or between two batches."""
    return Progress(_find_done(trainer), trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def _find_done(trainer: Trainer) -> Literal["batch", "step", "validation", "epoch"] | None:
    loop = trainer.fit_loop
    batches: Any = loop.epoch_loop.batch_progress.current
    epochs: Any = loop.epoch_progress.total
    if epochs.completed == epochs.started:
        return None
    if epochs.processed == epochs.started:
        return "epoch"
    if batches.processed != batches.ready:
        return None
    if trainer.validating:  # an interrupted validation has not been made
        return "validation" if is_hook_of_loop(trainer.lightning_module, "on_validation_end") else "step"
    return "batch" if batches.completed == batches.processed else "step"


def end_epoch(trainer: Trainer, is_last_batch: bool) -> None:
    """Finish an epoch whose last hook saved the checkpoint; at the real end of an epoch, step `ReduceLROnPlateau`.

    Lightning would skip that step and, with `max_steps`, end the epoch twice. Call after loops and data are loaded.
    """
    loop = trainer.fit_loop
    loop.epoch_loop.val_loop._has_run = False  # in a run before this one
    for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
        part._restarting = False
    if is_last_batch:
        with ExitStack() as cleanup:
            # Values that the module logs in `on_train_epoch_end` are missing, because callbacks saved before it.
            # Schedulers that monitor such a value warn instead of raise.
            for config in trainer.lr_scheduler_configs:
                cleanup.callback(setattr, config, "strict", config.strict)
                config.strict = False
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)


def complete_batch(trainer: Trainer, is_last_batch: bool) -> None:
    """Mark the batch of the checkpoint as completed, so that the work after it comes next.

    Lightning would skip that work, and continue the batch count of an epoch in the next epoch.
    """
    loop = trainer.fit_loop
    loop.epoch_loop.val_loop._has_run = False  # in a run before this one
    total: Any = loop.epoch_loop.batch_progress.total
    current: Any = loop.epoch_loop.batch_progress.current
    total.completed = total.processed
    if is_last_batch and loop.max_batches != float("inf"):
        current.ready = current.started = current.processed = int(loop.max_batches)
    current.completed = current.processed


def advance(trainer: Trainer, progress: Progress) -> None:
    """Let the resumed epoch continue and end as any other; call before its first fetch, after `complete_batch`.

    Lightning would skip `ReduceLROnPlateau` at its end, and repeat the end of the last batch.
    """
    trainer.fit_loop._restarting = False
    loop = trainer.fit_loop.epoch_loop
    if progress.done == "batch":
        loop._restarting = False
    if progress.is_after_batch:
        loop.batch_progress.is_last_batch = progress.is_last_batch
        loop.val_loop.restarting = False
        loop._skip_next_val = progress.done == "validation"


def restore_callback_metrics(trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
    """Give callbacks and schedulers the values that were logged before the interruption."""
    trainer._logger_connector._callback_metrics.update(metrics)


def resume_training_data(
    cleanup: ExitStack, trainer: Trainer, ends_epoch: Callable[[], bool], after_setup: Callable[[], None]
) -> None:
    """Start the training data at the position of a checkpoint; `ends_epoch` returns True if that is an epoch's end.

    Lightning keeps loaders that `estimated_stepping_batches` set up before the loops were loaded, iterates before
    samplers know the epoch, and warns of loaders without `_Stateful`, although they resume. `after_setup` runs once the
    data of the resumed epoch is set up.
    """
    loop = trainer.fit_loop
    setup, load, reset = loop.setup_data, loop._load_combined_loader_states, loop.epoch_loop.reset
    is_set_up = False

    def is_resuming() -> bool:  # Lightning 2.5.3 has a property for it
        return bool(getattr(loop, "is_resuming", loop._loaded_from_state_dict))

    def setup_data() -> None:
        nonlocal is_set_up
        if not is_resuming() or is_set_up:
            setup()
            return
        is_set_up = True
        loop._combined_loader = None
        setup()
        after_setup()

    def load_states() -> None:
        assert loop._combined_loader is not None
        if is_resuming() and ends_epoch():
            loop._combined_loader_states_to_load = []
        epoch: int = loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        for loader in loop._combined_loader.flattened:
            for owner in (loader, getattr(loader, "batch_sampler", None)):
                sampler: Any = getattr(owner, "sampler", None)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
        load()

    def reset_epoch() -> None:
        with warnings.catch_warnings():
            message = "You're resuming from a checkpoint that ended before"
            warnings.filterwarnings("ignore", message, PossibleUserWarning)
            reset()

    replace_attributes(cleanup, loop, setup_data=setup_data, _load_combined_loader_states=load_states)
    replace_attributes(cleanup, loop.epoch_loop, reset=reset_epoch)

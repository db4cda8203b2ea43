"""Private names of Lightning that a run needs to resume as if nothing had happened; see `_compat.lightning`."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer
from torch import Tensor

EndOfEpoch = Literal["trained", "validated", "ended"]


def go_on_as_uninterrupted(trainer: Trainer, between_batches: bool) -> None:
    """Let the epoch that was resumed go on and end as any other; to be called before its first batch is fetched.

    Lightning leaves `ReduceLROnPlateau` out at its end, and goes through the end of the last batch once more.

    Args:
        trainer: The Trainer, after it has resumed.
        between_batches: Whether everything about the last batch had been done when the checkpoint was saved.
    """
    trainer.fit_loop._restarting = False
    if between_batches:
        trainer.fit_loop.epoch_loop._restarting = False


def find_end_of_epoch(trainer: Trainer) -> EndOfEpoch | None:
    """Tell whether the last batch of an epoch is over, but not the epoch, and how far that has got.

    Hooks that save a checkpoint there are `on_train_batch_end`, `on_validation_end` and `on_train_epoch_end`.
    """
    loop = trainer.fit_loop
    batches: Any = loop.epoch_loop.batch_progress.current
    epochs: Any = loop.epoch_progress.total
    is_over = 0 < batches.ready == batches.processed and loop.epoch_loop._num_ready_batches_reached()
    if not is_over or epochs.completed == epochs.started:
        return None
    if epochs.processed == epochs.started:
        return "ended"
    if not trainer.validating:
        return "trained"
    validated = loop.epoch_loop.val_loop.batch_progress
    has_ended = validated.is_last_batch and validated.current.completed == validated.current.ready
    return "validated" if has_ended else None


def resume_at_end_of_epoch(trainer: Trainer, end: EndOfEpoch) -> None:
    """Take all batches of the epoch for done, however many ranks divide them now.

    Lightning would leave out what is due at the end of this epoch, or go on to count its batches in the next. With
    `max_steps`, it would end an epoch twice.

    Args:
        trainer: The Trainer, when the state of its loops and the training data have been loaded.
        end: How far the end of the epoch had got.
    """
    loop = trainer.fit_loop
    loop.epoch_loop.val_loop._has_run = False  # in a run before this one
    if end == "ended":
        for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
            part._restarting = False
        plateaus = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        if all(config.monitor in trainer.callback_metrics for config in plateaus):
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        return
    total: Any = loop.epoch_loop.batch_progress.total
    current: Any = loop.epoch_loop.batch_progress.current
    total.completed = total.processed
    if loop.max_batches != float("inf"):
        current.ready = current.started = current.processed = int(loop.max_batches)
    current.completed = current.processed


def pass_over_batches(trainer: Trainer, has_validated: bool) -> None:
    """Go on to what is due at the end of an epoch, rather than fetch a batch.

    Args:
        trainer: The Trainer, after `resume_at_end_of_epoch`.
        has_validated: Whether a validation that was due has been made.
    """
    loop = trainer.fit_loop.epoch_loop
    loop.batch_progress.is_last_batch = True
    loop.val_loop.restarting = False
    loop._skip_next_val = has_validated


def restore_callback_metrics(trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
    """Let callbacks and schedulers find the values that were logged before the run was interrupted."""
    trainer._logger_connector._callback_metrics.update(metrics)


def resume_training_data(trainer: Trainer, ends_epoch: Callable[[], bool], after_setup: Callable[[], None]) -> None:
    """Let training data begin where a checkpoint says, which Lightning gets wrong in three ways.

    It keeps the loaders that were set up before the state of loops was loaded, as `estimated_stepping_batches` does. It
    begins to iterate before samplers know the epoch. And it warns of loaders that are no `_Stateful`, though these
    resume.

    Args:
        trainer: The Trainer.
        ends_epoch: Returns whether the checkpoint is one of the end of an epoch, so that no batches are passed over.
        after_setup: Called when data have been set up for the first epoch of a run that resumes.
    """
    loop = trainer.fit_loop
    setup, load, reset = loop.setup_data, loop._load_combined_loader_states, loop.epoch_loop.reset

    is_set_up = False

    def setup_data() -> None:
        nonlocal is_set_up
        if not loop.is_resuming or is_set_up:
            setup()
            return
        is_set_up = True
        loop._combined_loader = None
        if ends_epoch():
            loop._combined_loader_states_to_load = []
        setup()
        after_setup()

    def load_states() -> None:
        assert loop._combined_loader is not None
        epoch: int = loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        for loader in loop._combined_loader.flattened:
            _set_sampler_epoch(loader, epoch)
        load()

    def reset_epoch() -> None:
        with warnings.catch_warnings():
            message = "You're resuming from a checkpoint that ended before"
            warnings.filterwarnings("ignore", message, PossibleUserWarning)
            reset()

    loop.setup_data = setup_data  # type: ignore[method-assign]
    loop._load_combined_loader_states = load_states  # type: ignore[method-assign]
    loop.epoch_loop.reset = reset_epoch  # type: ignore[method-assign]


def reload_training_data_after_epoch(trainer: Trainer, before: Callable[[], None]) -> None:
    """Let the training loop ask for its loaders again when this epoch is over: the next has another length.

    Args:
        trainer: The Trainer, while it fits.
        before: Called before that.
    """
    loop, epoch = trainer.fit_loop, trainer.current_epoch
    original = loop.setup_data

    def setup_data() -> None:
        if trainer.current_epoch != epoch:
            loop.setup_data = original  # type: ignore[method-assign]
            loop._combined_loader = None
            before()
        original()

    loop.setup_data = setup_data  # type: ignore[method-assign]


def restore_training_data(trainer: Trainer) -> None:
    """Undo `resume_training_data` and `reload_training_data_after_epoch`."""
    for owner, name in (
        (trainer.fit_loop, "setup_data"),
        (trainer.fit_loop, "_load_combined_loader_states"),
        (trainer.fit_loop.epoch_loop, "reset"),
    ):
        owner.__dict__.pop(name, None)

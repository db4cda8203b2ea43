"""Private names of Lightning that a run needs to resume as if nothing had happened; see `_compat.lightning`."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_ddp_ext._compat.lightning import is_hook_of_loop

Progress = Literal["trained", "validated", "ended", "between batches"]


def find_progress(trainer: Trainer) -> Progress | None:
    """Tell what has been done when a hook saves a checkpoint: all that hooks of a batch or of an epoch come after.

    Hooks that do so are `on_train_batch_end`, after which a validation and `ReduceLROnPlateau` may be due,
    `on_validation_end`, and `on_train_epoch_end`. A validation that is interrupted has not been made.

    Returns:
        None within a batch, and outside of epochs.
    """
    loop = trainer.fit_loop
    batches: Any = loop.epoch_loop.batch_progress.current
    epochs: Any = loop.epoch_progress.total
    if epochs.completed == epochs.started:
        return None
    if epochs.processed == epochs.started:
        return "ended"
    if not 0 < batches.ready == batches.processed:
        return None
    return "validated" if is_hook_of_loop(trainer.lightning_module, "on_validation_end") else "trained"


def is_last_batch(trainer: Trainer) -> bool:
    """Tell whether an epoch has no other batch."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def end_epoch(trainer: Trainer) -> None:
    """Do what is left of an epoch whose last hook has saved the checkpoint: `ReduceLROnPlateau` makes its step.

    Lightning would leave that out and, with `max_steps`, end the epoch twice.

    Args:
        trainer: The Trainer, when the state of its loops and the training data have been loaded.
    """
    loop = trainer.fit_loop
    loop.epoch_loop.val_loop._has_run = False  # in a run before this one
    for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
        part._restarting = False
    configs = trainer.lr_scheduler_configs
    strict = [config.strict for config in configs]
    for config in configs:
        config.strict = False  # what the module logs in its own `on_train_epoch_end` comes after callbacks have saved
    loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    for config, given in zip(configs, strict, strict=True):
        config.strict = given


def complete_batch(trainer: Trainer, is_last: bool) -> None:
    """Take the batch after which a checkpoint was saved for done, so that what is due after it comes next.

    Lightning would leave that out, and go on to count the batches of an epoch in the next.

    Args:
        trainer: The Trainer, when the state of its loops and the training data have been loaded.
        is_last: Whether the epoch has no other batch, however many ranks divide it now.
    """
    loop = trainer.fit_loop
    loop.epoch_loop.val_loop._has_run = False  # in a run before this one
    total: Any = loop.epoch_loop.batch_progress.total
    current: Any = loop.epoch_loop.batch_progress.current
    total.completed = total.processed
    if is_last and loop.max_batches != float("inf"):
        current.ready = current.started = current.processed = int(loop.max_batches)
    current.completed = current.processed


def go_on_after_batch(trainer: Trainer, is_last: bool, has_validated: bool) -> None:
    """Go on to what is due after a batch, rather than fetch one.

    Args:
        trainer: The Trainer, after `complete_batch`.
        is_last: Whether the epoch has no other batch.
        has_validated: Whether a validation that was due has been made.
    """
    loop = trainer.fit_loop.epoch_loop
    loop.batch_progress.is_last_batch = is_last
    loop.val_loop.restarting = False
    loop._skip_next_val = has_validated


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
        setup()
        after_setup()

    def load_states() -> None:
        assert loop._combined_loader is not None
        if loop.is_resuming and ends_epoch():
            loop._combined_loader_states_to_load = []
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

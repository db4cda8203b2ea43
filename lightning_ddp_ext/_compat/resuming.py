"""Private names of Lightning that a run needs to resume as if nothing had happened; see `_compat.lightning`."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor

from lightning_ddp_ext._compat.lightning import is_hook_of_loop


@dataclass(frozen=True)
class Progress:
    """How far the training loops had got when a checkpoint was saved.

    Attributes:
        done: What had been done last: `"batch"` is a batch with all that follows it, `"step"` one without a validation
            that may be due, `"validation"` is that validation, and `"epoch"` an epoch but for the last it does. None is
            anything else, such as a part of a batch.
        is_last_batch: Whether the epoch has no other batch.
    """

    done: Literal["batch", "step", "validation", "epoch"] | None
    is_last_batch: bool

    @property
    def is_after_batch(self) -> bool:
        """Whether what follows a batch comes next."""
        return self.done in ("step", "validation")

    @property
    def ends_epoch(self) -> bool:
        """Whether no batch of the epoch comes next."""
        return self.done == "epoch" or (self.is_after_batch and self.is_last_batch)


def find_progress(trainer: Trainer) -> Progress:
    """Tell how far the training loops have got, while a hook saves a checkpoint or ranks leave between two batches."""
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
    """Do what is left of an epoch whose last hook has saved the checkpoint: `ReduceLROnPlateau` makes its step.

    Lightning would leave that out and, with `max_steps`, end the epoch twice.

    Args:
        trainer: The Trainer, when the state of its loops and the training data have been loaded.
        is_last_batch: Whether the epoch had gone to its end; otherwise there is no such step.
    """
    loop = trainer.fit_loop
    loop.epoch_loop.val_loop._has_run = False  # in a run before this one
    for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
        part._restarting = False
    if is_last_batch:
        # What the module logs in its own `on_train_epoch_end` comes after callbacks have saved.
        with _without_strictness(trainer.lr_scheduler_configs):
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)


@contextmanager
def _without_strictness(configs: Sequence[LRSchedulerConfig]) -> Iterator[None]:
    """Leave out schedulers whose value is not there, with a warning."""
    given = [config.strict for config in configs]
    for config in configs:
        config.strict = False
    try:
        yield
    finally:
        for config, strict in zip(configs, given, strict=True):
            config.strict = strict


def complete_batch(trainer: Trainer, is_last_batch: bool) -> None:
    """Take the batch after which a checkpoint was saved for done, so that what is due after it comes next.

    Lightning would leave that out, and go on to count the batches of an epoch in the next.

    Args:
        trainer: The Trainer, when the state of its loops and the training data have been loaded.
        is_last_batch: Whether the epoch has no other batch, however many ranks divide it now.
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
    """Let the epoch that was resumed go on and end as any other; to be called before its first batch is fetched.

    Lightning leaves `ReduceLROnPlateau` out at its end, and goes through the end of the last batch once more.

    Args:
        trainer: The Trainer, after it has resumed, and after `complete_batch` if what follows a batch comes next.
        progress: How far the loops had got.
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

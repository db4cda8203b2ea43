"""Private names of Lightning's loops and of the data they run on, each with its reason; see `_compat.lightning`.

Private methods of `CombinedLoader` that are overridden: `_state_dicts` and `_load_state_dicts`, which the training loop
calls to save and load its position.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.types import _Stateful
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

EndOfEpoch = Literal["trained", "validated", "ended"]


def is_list_of_batches(trainer: Trainer, batch: Any) -> bool:
    """Tell whether a batch is a list with one batch of each of several loaders, rather than a list of samples."""
    loop = trainer._active_loop
    combined = None if loop is None else loop._combined_loader
    return (
        combined is not None
        and combined._mode != "sequential"
        and isinstance(combined.iterables, list | tuple)
        and type(batch) is type(combined.iterables)
        and len(batch) == len(combined.iterables)
    )


def logs_now(trainer: Trainer) -> bool:
    """Tell whether what is logged in this step is passed on to loggers."""
    return trainer._logger_connector.should_update_logs


def leaves_out_backward(trainer: Trainer) -> bool:
    """Tell whether the loop runs training steps for their statistics alone, as for averaged weights."""
    return bool(trainer.fit_loop._skip_backward)


def replace_signal_handling(trainer: Trainer, register: Callable[[], None]) -> None:
    """Replace what Lightning does about signals: it communicates and saves within signal handlers.

    Handlers that were there before are back when the run has ended, as with Lightning's own.

    Args:
        trainer: The Trainer, before it registers its signal handlers.
        register: Registers other handlers.
    """
    connector = trainer._signal_connector

    def register_handlers() -> None:
        connector.received_sigterm = False
        connector._original_handlers = connector._get_current_signal_handlers()
        register()

    connector.register_signal_handlers = register_handlers  # type: ignore[method-assign]
    # It asks all ranks before every batch.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def restore_signal_handling(trainer: Trainer) -> None:
    """Undo `replace_signal_handling`."""
    trainer._signal_connector.__dict__.pop("register_signal_handlers", None)
    trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)


def before_each_batch(trainer: Trainer, action: Callable[[], bool]) -> None:
    """Call something before each training batch is fetched, when everything about the one before it is done.

    No hook is called there: validation and the end of an epoch come after the hooks of a batch.

    Args:
        trainer: The Trainer.
        action: What to call. Where it returns False, no batch is fetched, and what follows a batch comes next.
    """
    loop = trainer.fit_loop.epoch_loop
    original = type(loop).advance.__get__(loop)

    def advance(data_fetcher: Any) -> None:
        if action():
            original(data_fetcher)

    loop.advance = advance  # type: ignore[method-assign]


def not_before_each_batch(trainer: Trainer) -> None:
    """Undo `before_each_batch`."""
    trainer.fit_loop.epoch_loop.__dict__.pop("advance", None)


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


def training_loader(trainer: Trainer) -> CombinedLoader | None:
    """Return the loader of the training loop; `trainer.train_dataloader` is only what it combines."""
    return trainer.fit_loop._combined_loader


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


def has_state(loader: object) -> bool:
    """Tell whether Lightning saves and loads the state of a loader."""
    return isinstance(loader, _Stateful)


def preemption_path(trainer: Trainer) -> str:
    """Return where a run that has to leave saves a checkpoint: where Lightning looks for it, `ckpt_path="hpc"`."""
    return trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)


def manual_step_progress(trainer: Trainer) -> Any:
    """Return what counts optimizer steps under manual optimization; `trainer.global_step` reads it."""
    return trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress


def combination_mode(combined: CombinedLoader) -> str:
    """Return the mode of a combined loader; there is no public way to read it."""
    mode: str = combined._mode
    return mode


def is_sampler_wrapper(sampler: object) -> bool:
    """Tell whether Lightning has wrapped a user's sampler, to deal out what that one draws."""
    return isinstance(sampler, DistributedSamplerWrapper | UnrepeatedDistributedSamplerWrapper)


def replace_preparation(trainer: Trainer, show: Callable[[DataLoader[Any]], DataLoader[Any]]) -> None:
    """Replace the loaders that Lightning looks at when it injects samplers; there is no hook before that.

    Args:
        trainer: The Trainer.
        show: Returns the loader that is looked at; one that gets no sampler stays the user's.
    """
    connector = trainer._data_connector

    def prepare(loader: Any, *args: Any, **kwargs: Any) -> Any:
        shown = show(loader) if isinstance(loader, DataLoader) else loader
        prepared = type(connector)._prepare_dataloader(connector, shown, *args, **kwargs)
        return loader if prepared is shown else prepared

    vars(connector)["_prepare_dataloader"] = prepare


def restore_preparation(trainer: Trainer) -> None:
    """Undo `replace_preparation`."""
    vars(trainer._data_connector).pop("_prepare_dataloader", None)


def replace_loaders(trainer: Trainer, replace: Callable[[Any, bool], Any]) -> None:
    """Replace what the loops that train and evaluate get when they ask for their loaders.

    Lightning makes a `CombinedLoader` of anything that is none, so this is where another one can be given to it.

    Args:
        trainer: The Trainer.
        replace: Maps what was asked for, and whether it is for training, to a `CombinedLoader`.
    """
    for source, is_training in _loader_sources(trainer):
        original = type(source).dataloader.__get__(source)

        def dataloader(original: Callable[[], Any] = original, is_training: bool = is_training) -> Any:
            return replace(original(), is_training)

        source.dataloader = dataloader


def restore_loaders(trainer: Trainer) -> None:
    """Undo `replace_loaders`."""
    for source, _ in _loader_sources(trainer):
        source.__dict__.pop("dataloader", None)


def _loader_sources(trainer: Trainer) -> Iterator[tuple[Any, bool]]:
    yield trainer.fit_loop._data_source, True
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        yield loop._data_source, False


def active_combined_loader(trainer: Trainer) -> CombinedLoader | None:
    """Return the loader of the loop that runs; `trainer.train_dataloader` is only what it combines."""
    loop = trainer._active_loop
    return None if loop is None else loop._combined_loader


@contextmanager
def without_batch_hooks(trainer: Trainer) -> Iterator[None]:
    """Call no hook of a batch in evaluation; the loop that runs goes on nevertheless."""
    module, owner = trainer.lightning_module, vars(trainer)
    callbacks = owner["callbacks"]
    names = [f"on_{stage}_batch_{end}" for stage in ("validation", "test") for end in ("start", "end")]
    kept = {name: vars(module)[name] for name in names if name in vars(module)}
    owner["callbacks"] = []
    vars(module).update(dict.fromkeys(names, lambda *_: None))
    try:
        yield
    finally:
        owner["callbacks"] = callbacks
        for name in names:
            del vars(module)[name]
        vars(module).update(kept)

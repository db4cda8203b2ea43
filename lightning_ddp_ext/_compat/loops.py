"""Private names of Lightning's loops, each with its reason; see `_compat.lightning`.

The data they run on is in `loaders`, and what a run that resumes needs in `resuming`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer


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


def preemption_path(trainer: Trainer) -> str:
    """Return where a run that has to leave saves a checkpoint: where Lightning looks for it, `ckpt_path="hpc"`."""
    return trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)


def manual_step_progress(trainer: Trainer) -> Any:
    """Return what counts optimizer steps under manual optimization; `trainer.global_step` reads it."""
    return trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress


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

"""Private names of Lightning's loops and signal handling. Checked on lightning 2.6.6."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Trainer

from lightning_ddp_ext._compat.lightning import replace_attributes


def logs_now(trainer: Trainer) -> bool:
    """Return True if loggers get the values of this step."""
    return trainer._logger_connector.should_update_logs


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

"""Private names of Lightning, each with its reason. Checked on lightning 2.6.6; `tests/compat` fails when one moves.

Private hooks that strategies override or read, held by a test:

    _configure_launcher   last call of the Trainer's constructor: the only place where every argument is known and
                          nothing has started yet
    _layer_sync           whether `Trainer(sync_batchnorm=True)`

Private methods of `CombinedLoader` that are overridden: `_state_dicts` and `_load_state_dicts`, which the training loop
calls to save and load its position.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch import device as Device

PRIVATE_STRATEGY_NAMES = frozenset({"_configure_launcher", "_layer_sync"})

_POPEN = "popen"  # of `DDPStrategy`; strategies without a choice do the same

# Attributes of a `LightningModule` that a replica has values of its own for: its device, the cache of its metrics'
# names, which is keyed by object id, and the `log` that records.
REPLICA_ATTRIBUTES = frozenset({"_device", "_metric_attributes", "log"})


def adopt_device(module: nn.Module, device: Device) -> None:
    """Make `LightningModule.device` of a replica the replica's; there is no public setter."""
    for part in module.modules():
        if isinstance(part, _DeviceDtypeModuleMixin):
            part.__dict__["_device"] = device
            part.__dict__.pop("_metric_attributes", None)
            if isinstance(part, LightningModule):
                part.__dict__["_metric_attributes"] = None


def data_hook_owner(trainer: Trainer, hook: str) -> Any:
    """Return the object whose override of a batch transfer hook counts: the module or the data module."""
    selector = trainer._data_connector._datahook_selector
    return trainer.lightning_module if selector is None else selector.get_instance(hook)


def takes_dataloader_iter(module: LightningModule, step: str) -> bool:
    """Tell whether a step asks for the iterator itself, `training_step(self, dataloader_iter)`."""
    return is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True)


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


def replace_signal_handling(trainer: Trainer, register: Callable[[], None]) -> None:
    """Replace what Lightning does about signals: it communicates and saves within signal handlers.

    Handlers that were there before are back when the run has ended, as with Lightning's own.

    Args:
        trainer: Of a run that has not registered its signal handlers yet.
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


def before_each_batch(trainer: Trainer, action: Callable[[], None]) -> None:
    """Call something before each training batch is fetched, when everything about the one before it is done.

    No hook is called there: validation and the end of an epoch come after the hooks of a batch.
    """
    loop = trainer.fit_loop.epoch_loop
    original = type(loop).advance.__get__(loop)

    def advance(data_fetcher: Any) -> None:
        action()
        original(data_fetcher)

    loop.advance = advance  # type: ignore[method-assign]


def not_before_each_batch(trainer: Trainer) -> None:
    """Undo `before_each_batch`."""
    trainer.fit_loop.epoch_loop.__dict__.pop("advance", None)


@contextmanager
def saved_between_batches(trainer: Trainer) -> Iterator[None]:
    """Save within this block what a resumed run counts as the uninterrupted one does.

    Where a validation was due after the last batch, Lightning goes through the end of that batch once more, and counts
    a step of the loggers again.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    repeated = int(fetcher is not None and loop._should_check_val_fx(fetcher))
    loop._batches_that_stepped -= repeated
    try:
        yield
    finally:
        loop._batches_that_stepped += repeated


def go_on_as_uninterrupted(trainer: Trainer) -> None:
    """Let the epoch that was resumed end as any other: Lightning leaves `ReduceLROnPlateau` out at its end."""
    trainer.fit_loop._restarting = False


def restore_callback_metrics(trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
    """Let callbacks and schedulers find the values that were logged before the run was interrupted."""
    trainer._logger_connector._callback_metrics.update(metrics)


def training_loader(trainer: Trainer) -> CombinedLoader | None:
    """Return the loader of the training loop; `trainer.train_dataloader` is only what it combines."""
    return trainer.fit_loop._combined_loader


def reload_training_data_after_epoch(trainer: Trainer) -> None:
    """Let the training loop ask for its loaders again when this epoch is over: the next has another length."""
    loop, epoch = trainer.fit_loop, trainer.current_epoch
    original = type(loop).setup_data.__get__(loop)

    def setup_data() -> None:
        if trainer.current_epoch != epoch:
            del loop.setup_data
            loop._combined_loader = None
        original()

    loop.setup_data = setup_data  # type: ignore[method-assign]


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


def repeats_the_command(strategy: Strategy) -> bool:
    """Tell whether a strategy starts the other processes of its host by repeating the command."""
    return str(getattr(strategy, "_start_method", _POPEN)) == _POPEN


def keep_weights_for_testing(trainer: Trainer) -> None:
    """Let `trainer.test` use the weights as they are.

    Under SLURM, Lightning loads the `hpc_ckpt_*.ckpt` of an earlier start of the job first, unless a checkpoint has
    been chosen by `trainer.ckpt_path`; None cannot be chosen there.
    """
    connector = trainer._checkpoint_connector
    connector._ckpt_path = None
    connector._user_managed = True


def is_hook_of_loop(module: LightningModule, hook: str) -> bool:
    """Tell whether a strategy's hook is called by a loop rather than by the user."""
    return module._current_fx_name == hook


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


def is_planned_end(error: BaseException) -> bool:
    """Tell whether an exception only ends a run that all ranks end: on SIGTERM, and where Lightning's tuner is done."""
    return isinstance(error, SIGTERMException | _TunerExitException) or (
        isinstance(error, SystemExit) and error.code in (None, 0)
    )


def surround_launch(launcher: Any, surround: Callable[[], AbstractContextManager[None]]) -> None:
    """Put a context around what a launcher runs on each rank.

    An error passes it before the Trainer calls `on_exception` of callbacks, which may wait for other ranks. There is no
    hook of a strategy that comes that early, or that may raise another error instead.

    Args:
        launcher: Of a strategy.
        surround: Makes the context; picklable, since it is used in the processes that the launcher starts.
    """
    launcher.launch = partial(_launch, launcher, surround)


def _launch(
    launcher: Any,
    surround: Callable[[], AbstractContextManager[None]],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    return type(launcher).launch(launcher, partial(_run_within, surround, function), *args, **kwargs)


def _run_within(
    surround: Callable[[], AbstractContextManager[None]], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with surround():
        return function(*args, **kwargs)

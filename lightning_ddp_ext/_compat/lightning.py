"""Private names of Lightning, each with its reason. Checked on lightning 2.6.6; `tests/compat` fails when one moves.

Private hooks that strategies override or read, held by a test:

    _configure_launcher   last call of the Trainer's constructor: the only place where every argument is known and
                          nothing has started yet
    _layer_sync           whether `Trainer(sync_batchnorm=True)`

The loops are in `loops`, the data they run on in `loaders`, and what resumes them in `resuming`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeGuard

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import device as Device
from torch import nn
from typing_extensions import override

from lightning_ddp_ext.errors import UnsupportedFeatureError

PRIVATE_STRATEGY_NAMES = frozenset({"_configure_launcher", "_layer_sync"})

_POPEN = "popen"  # of `DDPStrategy`; strategies without a choice do the same

# Attributes of a `LightningModule` that a replica has values of its own for: its device, the cache of its metrics'
# names, which is keyed by object id, and the `log` and `log_dict` that record.
REPLICA_ATTRIBUTES = frozenset({"_device", "_metric_attributes", "log", "log_dict"})


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
    method = getattr(module, step)  # None switches a step off
    return method is not None and is_param_in_hook_signature(method, "dataloader_iter", explicit=True)


class OneTrainerStrategy(Strategy):
    """A strategy that says what to do when it is passed to a second Trainer.

    Lightning refuses that as well, but takes the settings of the first Trainer for the user's and names conflicts that
    nobody has caused. It reads `_accelerator` before any other setting of a strategy, and only in a Trainer's
    constructor; everything else reads `accelerator`, which a Trainer sets when it takes the strategy.
    """

    _given_accelerator: Accelerator | None = None
    _has_trainer = False

    @property
    def _accelerator(self) -> Accelerator | None:
        if self._has_trainer:
            raise UnsupportedFeatureError(
                f"this `{type(self).__name__}` has been passed to a Trainer already, whose devices, precision and"
                " plugins it keeps. Create a new strategy for each Trainer."
            )
        return self._given_accelerator

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        self._given_accelerator = accelerator

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return self._given_accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        self._given_accelerator = accelerator
        self._has_trainer = True


def takes_batch_idx(module: LightningModule) -> bool:
    """Return True if the loop passes a batch index to `training_step`, which may name the argument as it likes."""
    return is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)


def given_checkpoint_io(strategy: Strategy) -> CheckpointIO | None:
    """Return what a strategy has been given to write checkpoints; its public attribute never is None."""
    given: CheckpointIO | None = strategy._checkpoint_io
    return given


def give_checkpoint_io(strategy: Strategy, checkpoint_io: CheckpointIO) -> None:
    """Set what `given_checkpoint_io` returns."""
    strategy._checkpoint_io = checkpoint_io


def is_wrapping(checkpoint_io: object) -> TypeGuard[_WrappingCheckpointIO]:
    """Tell whether a `CheckpointIO` leaves writing to another one, as `AsyncCheckpointIO` does."""
    return isinstance(checkpoint_io, _WrappingCheckpointIO)


def in_interactive_session() -> bool:
    """Return True if the Trainer takes this process for a notebook or an interactive interpreter.

    It then refuses strategies that start processes in another way than by fork.
    """
    return bool(accelerator_connector._IS_INTERACTIVE)  # type: ignore[attr-defined]  # imported there from Fabric


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


def is_planned_end(error: BaseException) -> bool:
    """Tell whether an exception only ends a run that all ranks end: on SIGTERM, and where Lightning's tuner is done."""
    return isinstance(error, SIGTERMException | _TunerExitException)


def is_exit(error: BaseException) -> bool:
    """Tell whether an exception is that of `sys.exit()`: no failure, but other ranks may know nothing of it."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


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

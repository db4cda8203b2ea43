"""Private names of Lightning's Trainer, Fabric, modules and strategies. Checked on lightning 2.6.6."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, TypeVar

from torch import device as Device
from torch import nn
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_names import _BackwardSyncControl, _DeviceDtypeModuleMixin, _TunerExitException
from lightning_ddp_ext._lightning import (
    Accelerator,
    CheckpointIO,
    FabricStrategy,
    LightningModule,
    ParallelStrategy,
    SIGTERMException,
    Strategy,
    Trainer,
    is_param_in_hook_signature,
)
from lightning_ddp_ext.errors import UnsupportedFeatureError

# Attributes of a `LightningModule` that differ between replicas: the device, the cache of metric names, which is keyed
# by object id, and the `log` that records.
REPLICA_ATTRIBUTES = frozenset({"_device", "_metric_attributes", "log"})


def replace_attributes(cleanup: ExitStack, owner: object, **replacements: Any) -> None:
    """Hide attributes of a Lightning object's class behind replacements, until `cleanup` closes."""
    vars(owner).update(replacements)
    for name in replacements:
        cleanup.callback(vars(owner).pop, name, None)


def adopt_device(module: nn.Module, device: Device) -> None:
    """Set `LightningModule.device` of a replica, which has no public setter."""
    for part in module.modules():
        if isinstance(part, _DeviceDtypeModuleMixin):
            part.__dict__["_device"] = device
            part.__dict__.pop("_metric_attributes", None)
            if isinstance(part, LightningModule):
                part.__dict__["_metric_attributes"] = None


def takes_dataloader_iter(module: LightningModule, step: str) -> bool:
    """Return True if a step takes the iterator itself, as in `training_step(self, dataloader_iter)`."""
    method = getattr(module, step)  # users may set a step to None
    return method is not None and is_param_in_hook_signature(method, "dataloader_iter", explicit=True)


class OneTrainerStrategy(Strategy):
    """A strategy that raises a clear error when it is passed to a second Trainer.

    A Trainer's constructor reads `_accelerator` before any other setting; it sets `accelerator` to take the strategy.
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
    """Return True if the loop passes a batch index to `training_step`, whatever the argument is called."""
    return is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)


def given_checkpoint_io(strategy: Strategy) -> CheckpointIO | None:
    """Return the `CheckpointIO` given to a strategy, or None; the public attribute is never None."""
    given: CheckpointIO | None = strategy._checkpoint_io
    return given


def give_checkpoint_io(strategy: Strategy, checkpoint_io: CheckpointIO) -> None:
    """Set the `CheckpointIO` that `given_checkpoint_io` returns."""
    strategy._checkpoint_io = checkpoint_io


def start_method_of(strategy: object) -> str:
    """Return how a strategy starts the other processes of its node: "popen" repeats the command."""
    return str(getattr(strategy, "_start_method", "popen"))


def synchronizes_batch_norm(strategy: ParallelStrategy) -> bool:
    """Return True if the Trainer has `sync_batchnorm=True`."""
    return strategy._layer_sync is not None


def keep_weights_for_testing(trainer: Trainer) -> None:
    """Have `trainer.test` keep the weights of the module.

    Under SLURM, Lightning first loads `hpc_ckpt_*.ckpt` of an earlier start of the job, unless `trainer.ckpt_path` is
    set, which cannot be None.
    """
    connector = trainer._checkpoint_connector
    connector._ckpt_path = None
    connector._user_managed = True


def is_hook_of_loop(module: LightningModule, hook: str) -> bool:
    """Return True if a loop, rather than the user, calls a strategy's hook."""
    return module._current_fx_name == hook


def is_planned_end(error: BaseException) -> bool:
    """Return True if all ranks end a run with this exception: on SIGTERM, and at the end of Lightning's tuner."""
    return isinstance(error, SIGTERMException | _TunerExitException)


def is_exit(error: BaseException) -> bool:
    """Return True if an exception comes from `sys.exit()`, which other ranks may not have called."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def surround_launch(launcher: Any, run: Callable[[Callable[[], Any]], Any], receive: Callable[[Any], Any]) -> None:
    """Call a launcher's function on each rank by the picklable `run(function)`, whose result passes through `receive`.

    No public hook sees an error before `on_exception` of callbacks, which may wait for other ranks, or may replace it.
    """
    launcher.launch = partial(_launch, launcher, run, receive)


def _launch(launcher: Any, run: Any, receive: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return receive(type(launcher).launch(launcher, partial(_run_by, run, function), *args, **kwargs))


def _run_by(run: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(partial(function, *args, **kwargs))


def keep_predictions(strategy: Strategy) -> None:
    """Have `trainer.predict` keep predictions in a process that was forked or spawned, where Lightning keeps none."""
    strategy._launcher = None


_Backward = TypeVar("_Backward", bound=Callable[..., None])


def allows_other_backward_passes(backward: _Backward) -> _Backward:
    """Mark the `backward` of a strategy, so that Fabric allows backward passes through a module's output without it.

    Fabric raises an error for strategies that override `backward`, also in `torch.autograd.grad`. Its test for that,
    `is_overridden`, looks through `functools.wraps`.
    """
    backward.__wrapped__ = FabricStrategy.backward  # type: ignore[attr-defined]
    return backward


class _Postponing(_BackwardSyncControl):
    def __init__(self, accumulate: Callable[[Any, bool], AbstractContextManager[None]]) -> None:
        self._accumulate = accumulate

    @override
    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[None]:
        return self._accumulate(module, enabled)


def postpone_synchronization(
    strategy: FabricStrategy, accumulate: Callable[[Any, bool], AbstractContextManager[None]]
) -> None:
    """Let `fabric.no_backward_sync(module, enabled)` run its block in the context of a function of both."""
    strategy._backward_sync_control = _Postponing(accumulate)

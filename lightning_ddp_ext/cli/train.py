"""Training: fit, test and write the results into the run folder; the same once more in one process, to compare."""

import copy
import functools
import itertools
import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import keep_weights_for_testing
from lightning_ddp_ext._import_names import LIBRARIES
from lightning_ddp_ext._lightning import (
    Callback,
    LambdaCallback,
    LightningDataModule,
    LightningEnvironment,
    LightningModule,
    Logger,
    MisconfigurationException,
    ModelCheckpoint,
    ProgressBar,
    Trainer,
    is_overridden,
    rank_zero_info,
    seed_everything,
)
from lightning_ddp_ext.batches.containers import to_device
from lightning_ddp_ext.batches.splitting import join_batches
from lightning_ddp_ext.cli.report import LaunchSummary, draw_run, print_comparison, print_results
from lightning_ddp_ext.cli.settings import LaunchError, instantiate
from lightning_ddp_ext.cli.validate import QUIET, check_run, make, make_all, make_trainer, prepare_config
from lightning_ddp_ext.distributed.exchange import destroy_group, gather_objects, own_group
from lightning_ddp_ext.distributed.serialization import name_skipped, pack
from lightning_ddp_ext.errors import BatchSplitError, CheckpointRefusedError, DDPExtError, UnsupportedFeatureError
from lightning_ddp_ext.resume.loading import TAKES_WEIGHTS_ONLY, WeightsOnlyLoadMixin, check_checkpoint
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy

# Errors whose message is the whole explanation, at any time of a run.
_EXPLAINED = (DDPExtError, MisconfigurationException)
_LIBRARIES = {*LIBRARIES, "lightning_ddp_ext", "torch"}


@dataclass(slots=True)
class _Run:
    """The objects of a run, before anything starts."""

    trainer: Trainer
    model: LightningModule
    data: LightningDataModule
    folder: Path
    recorder: "BatchRecorder | None"
    summary: LaunchSummary


def train(config: DictConfig) -> None:
    """Fit and test; a LaunchError is the one message of a run that cannot start."""
    run = _build(config)
    if run.trainer.is_global_zero:
        keep_config(config, run.folder)
        _keep_metrics(run.folder)
    _fit(config, run)
    results = _test(config, run) if config.test else {}
    if run.trainer.is_global_zero:
        if config.plot:
            draw_run(run.folder, run.trainer)
        print_results(results, run.trainer, run.folder)
    if run.recorder is not None:
        _compare(config, run, run.recorder, results)


def _build(config: DictConfig) -> _Run:
    try:
        hydra = HydraConfig.get()
        choices: Any = hydra.runtime.choices
        prepare_config(config, choices)
        seed_everything(config.seed, workers=True, verbose=False)
        strategy = instantiate(config.strategy)
        model = make(config.model, "model", LightningModule)
        data = make(config.data, "data", LightningDataModule)
        callbacks = _enabled(make_all(config.callbacks, "callbacks", Callback), config.trainer)
        loggers = make_all(config.logger, "logger", Logger)
        folder = Path(hydra.runtime.output_dir)
        recorder = BatchRecorder() if _compares(config, model, data) else None
        summary = LaunchSummary(folder, str(choices.strategy))
        trainer = make_trainer(
            config,
            strategy,
            callbacks=[summary, *callbacks, *([recorder] if recorder else [])],
            logger=loggers or False,
            default_root_dir=str(config.trainer.default_root_dir or folder),
        )
        check_run(config, hydra, trainer)
    except Exception as error:
        # Any error of a constructor: the run has not started, and the command prints one message.
        raise LaunchError(str(error)) from error
    return _Run(trainer, model, data, folder, recorder, summary)


def _enabled(callbacks: list[Callback], trainer: DictConfig) -> list[Callback]:
    """Drop the callbacks that the Trainer's `enable_*` arguments disable."""
    enabled = {ProgressBar: trainer.enable_progress_bar, ModelCheckpoint: trainer.enable_checkpointing}
    disabled = tuple(kind for kind, is_enabled in enabled.items() if is_enabled is False)
    return [callback for callback in callbacks if not isinstance(callback, disabled)]


def _compares(config: DictConfig, model: LightningModule, data: LightningDataModule) -> bool:
    """Return True if the run is compared with one process; refuse runs that one process cannot repeat."""
    wanted = config.compare_single_process
    if wanted is False or (wanted is None and config.data.get("train_fractions") is None):
        return False
    if has_started_before():
        rank_zero_info("No comparison with one process, because this job was requeued.")
        return False
    hooks = ("on_before_batch_transfer", "on_after_batch_transfer")
    reason = None
    if not config.test:
        reason = "compares the results of the test, and `test=false` is set"
    elif config.ckpt_path is not None:
        reason = "trains from the beginning, and `ckpt_path` resumes"
    elif config.strategy.get("start_method") not in (None, "popen"):
        reason = f"needs processes that outlive training, and `start_method={config.strategy.start_method}` ends them"
    elif any(is_overridden(hook, source) for hook in hooks for source in (model, data)):
        reason = "would change batches twice: `on_before_batch_transfer` or `on_after_batch_transfer` is overridden"
    if reason is not None and wanted:
        raise LaunchError(f"`compare_single_process=true` {reason}. Set `compare_single_process=false`.")
    return reason is None


def _fit(config: DictConfig, run: _Run) -> None:
    run.summary.resumes = path = checkpoint_to_resume(config.ckpt_path, run.trainer)
    options = {"weights_only": config.weights_only} if TAKES_WEIGHTS_ONLY else {}
    if not options and not config.weights_only:
        raise LaunchError("`weights_only=false` needs Lightning 2.6. Install it, or leave this out.")
    with _explained(config, run):
        if path is not None and not isinstance(run.trainer.strategy, WeightsOnlyLoadMixin):
            check_checkpoint(path, run.trainer.strategy.checkpoint_io, allows_code=not config.weights_only)
        run.trainer.fit(run.model, datamodule=run.data, ckpt_path=path, **options)


def _test(config: DictConfig, run: _Run) -> Mapping[str, float]:
    if not is_overridden("test_step", run.model) or not is_overridden("test_dataloader", run.data):
        rank_zero_info("Not tested: the model has no `test_step`, or the data no `test_dataloader`.")
        return {}
    keep_weights_for_testing(run.trainer)
    with _explained(config, run):
        return merge_results(run.trainer.test(run.model, datamodule=run.data, verbose=False))


def _compare(config: DictConfig, run: _Run, recorder: "BatchRecorder", results: Mapping[str, float]) -> None:
    """Train once more in one process, on rank 0, and print both results."""
    if dist.is_initialized():
        destroy_group()  # metrics would synchronise through it
    if run.trainer.is_global_zero:
        rank_zero_info("Training once more in one process, on the same batches.")
        with _explained(config, run):
            print_comparison(results, *train_single_process(config, run.trainer, recorder), run.trainer)


@contextmanager
def _explained(config: DictConfig, run: _Run) -> Iterator[None]:
    """Replace errors whose message is the whole explanation by a LaunchError, which the command prints as one line."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CheckpointRefusedError) and error.names:
            raise LaunchError(f"{error.problem} Set `weights_only=false` if you trust its author.") from None
        if not _is_mistake(error, run):
            raise
        raise LaunchError(str(error)) from error


def _is_mistake(error: Exception, run: _Run) -> bool:
    """Return True for a wrong setting, False for an error of the user's code, which needs its traceback."""
    if isinstance(error, _EXPLAINED):
        return True
    if run.summary.has_begun:
        return False
    parts = (run.model, run.data, *run.trainer.callbacks, *run.trainer.loggers)  # type: ignore[attr-defined]
    users = {type(part).__module__.partition(".")[0] for part in parts} - _LIBRARIES
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return not any(frame.f_globals.get("__name__", "").partition(".")[0] in users for frame in frames)


def keep_config(config: DictConfig, folder: Path) -> None:
    """Write the whole configuration, readable by the owner only: it may hold keys from the environment."""
    path = folder / "config.yaml"
    path.touch(mode=0o600)
    path.chmod(0o600)  # the file may have existed
    OmegaConf.save(config, path, resolve=True)


def _keep_metrics(folder: Path) -> None:
    """Rename the metrics of a job before it was requeued, which Lightning's logger would delete."""
    metrics = folder / "metrics.csv"
    if metrics.exists():
        names = (folder / f"metrics-{number}.csv" for number in itertools.count(1))
        metrics.rename(next(path for path in names if not path.exists()))


def has_started_before() -> bool:
    """Return True in a job that SLURM has requeued."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0


def checkpoint_to_resume(given: str | None, trainer: Trainer) -> str | None:
    """Return the configured checkpoint; for a requeued job, the newest of its checkpoints.

    That is `"hpc"`, saved at the preemption, or `"last"`, saved by a callback before a node failed.
    """
    if not has_started_before():
        return given
    hpc = _newest(Path(trainer.default_root_dir), "hpc_ckpt_*.ckpt")
    last = 0.0
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath:
            pattern = f"{callback.CHECKPOINT_NAME_LAST}*{callback.FILE_EXTENSION}"
            last = max(last, _newest(Path(callback.dirpath), pattern))
    if hpc > last:
        return "hpc"
    # A given path is older. Lightning finds checkpoints on remote file systems itself.
    return "last" if last or given is None else given


def _newest(folder: Path, pattern: str) -> float:
    """Return the time of the newest file, 0 if there is none."""
    return max((path.stat().st_mtime for path in folder.glob(pattern)), default=0.0)


_CPU = torch.device("cpu")

# (epoch, index of the batch of the single process)
_BatchIndex = tuple[int, int]


class BatchRecorder(Callback):
    """Keeps every training batch of every rank in memory, and collects them on rank 0 at the end.

    With our strategies, an accumulation window has the gradient of one large batch, and the single process trains on
    one concatenated batch per window. Other strategies average batches, and the single process accumulates as well.
    """

    def __init__(self) -> None:
        self.batches: dict[_BatchIndex, list[Any]] = {}
        self.length: int | None = None  # batches per epoch of the single process, if known
        self.accumulated = 1  # batches per optimizer step of the single process

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not getattr(trainer.strategy, "is_shadow", False):
            index = trainer.current_epoch, batch_idx // _window(trainer)
            recorded = copy.deepcopy(to_device(batch, _CPU))
            if trainer.world_size > 1 and (skipped := pack(recorded).skipped):
                raise UnsupportedFeatureError(
                    f"rank {trainer.global_rank}: a batch holds {name_skipped(skipped)}, which cannot be sent to rank 0"
                    " without running code there, and the comparison with one process needs all batches. Set"
                    " `compare_single_process=false`."
                )
            self.batches.setdefault(index, []).append(recorded)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        batches = trainer.num_training_batches
        self.length = None if math.isinf(batches) else math.ceil(batches / _window(trainer))
        self.accumulated = trainer.accumulate_grad_batches // _window(trainer)
        if trainer.world_size == 1:
            return
        group = own_group()
        gathered: list[dict[_BatchIndex, list[Any]]] = gather_objects(dict(self.batches), group)
        destroy_group(group)
        indices = sorted({index for batches in gathered for index in batches})
        self.batches = {index: [batch for batches in gathered for batch in batches.get(index, ())] for index in indices}


def train_single_process(config: DictConfig, run: Trainer, recorder: BatchRecorder) -> tuple[dict[str, float], float]:
    """Repeat the training of `run`, whose process group is destroyed, in one process on the recorded batches.

    Returns the test metrics, and the norm of the difference of all parameters to the run, relative to their norm.
    """
    seed_everything(config.seed, workers=True, verbose=False)
    model: LightningModule = instantiate(config.model)
    data: LightningDataModule = instantiate(config.data)
    device = run.strategy.root_device
    trainer: Trainer = instantiate(
        config.trainer,
        strategy="auto",
        devices=1 if device.index is None else [device.index],
        num_nodes=1,
        plugins=config.trainer.plugins or [LightningEnvironment()],
        callbacks=[LambdaCallback(on_train_batch_end=functools.partial(_stop_after, run.global_step))],
        # The recorded batches are already limited by these arguments.
        accumulate_grad_batches=recorder.accumulated,
        limit_train_batches=None,
        overfit_batches=0.0,
        val_check_interval=None,
        min_epochs=None,
        min_steps=None,
        profiler=None,
        **QUIET,
    )
    concatenate = getattr(data, "concatenate_batches", _concatenate)
    loader = _Replay(recorder, trainer, concatenate)
    setattr(data, "train_dataloader", lambda: loader)  # noqa: B010  a method of this instance
    trainer.fit(model, datamodule=data)
    results = merge_results(trainer.test(model, datamodule=data, verbose=False))
    assert run.lightning_module is not None
    return results, _difference(run.lightning_module, model)


def merge_results(by_loader: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the results of all test loaders, whose names Lightning makes distinct."""
    return {name: value for results in by_loader for name, value in results.items()}


def _window(trainer: Trainer) -> int:
    """Return the number of batches of a rank in one batch of the single process."""
    return trainer.accumulate_grad_batches if isinstance(trainer.strategy, ExplicitDDPStrategy) else 1


@dataclass(frozen=True)
class _Replay:
    """A loader of the recorded batches."""

    recorder: BatchRecorder
    trainer: Trainer
    concatenate: Callable[[Sequence[Any]], Any]

    def __iter__(self) -> Iterator[Any]:
        for (epoch, _), batches in self.recorder.batches.items():
            if epoch == self.trainer.current_epoch:
                yield batches[0] if len(batches) == 1 else self.concatenate(batches)

    def __len__(self) -> int:
        if self.recorder.length is None:
            raise TypeError("the number of batches was not known")
        return self.recorder.length


def _stop_after(steps: int, trainer: Trainer, *_: Any) -> None:
    trainer.should_stop = trainer.should_stop or trainer.global_step >= steps


def _concatenate(batches: Sequence[Any]) -> Any:
    try:
        return join_batches(batches)
    except BatchSplitError as error:
        raise UnsupportedFeatureError(
            f"the batches of the ranks cannot be concatenated ({error.problem}), which the comparison with one process"
            " needs. Give the data module a method `concatenate_batches(self, batches)`, or set"
            " `compare_single_process=false`."
        ) from error


def _difference(one: LightningModule, other: LightningModule) -> float:
    parameters, others = (
        torch.cat([parameter.detach().to(_CPU, torch.float64).flatten() for parameter in module.parameters()])
        for module in (one, other)
    )
    return float((parameters - others).norm() / others.norm())

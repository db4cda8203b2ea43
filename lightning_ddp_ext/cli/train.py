"""The main job: build what the configuration describes, train, test, and leave the results in the run folder."""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf

from lightning_ddp_ext._compat.lightning import keep_weights_for_testing
from lightning_ddp_ext.callbacks import BalanceReport
from lightning_ddp_ext.cli.checks import make, make_all
from lightning_ddp_ext.cli.picture import draw_run
from lightning_ddp_ext.cli.preflight import check_meeting, check_slurm, has_network_settings
from lightning_ddp_ext.cli.preparation import check_run, make_plugins, prepare_config
from lightning_ddp_ext.cli.problems import LaunchError
from lightning_ddp_ext.cli.reference import BatchRecorder, merge_results, train_alone
from lightning_ddp_ext.cli.run_folder import checkpoint_to_resume, has_started_before, keep_config, keep_metrics
from lightning_ddp_ext.cli.summary import LaunchSummary, print_comparison, print_results
from lightning_ddp_ext.errors import CheckpointRefusedError, DDPExtError
from lightning_ddp_ext.integration.checkpoints.checkpoint_loading import is_refusal, refusal

# What says by itself what is wrong with a run, whenever it comes.
_EXPLAINED = (DDPExtError, MisconfigurationException)
_NOT_THEIRS = ("lightning", "lightning_ddp_ext", "torch")


@dataclass(slots=True)
class _Run:
    """Everything a run needs, built before anything starts."""

    trainer: Trainer
    model: LightningModule
    data: LightningDataModule
    folder: Path
    recorder: BatchRecorder | None
    summary: LaunchSummary


def train(config: DictConfig) -> None:
    """Fit and test.

    Args:
        config: The composed configuration, see `lightning_ddp_ext.config.TrainConfig`.

    Raises:
        LaunchError: If the run cannot start; nothing has been started then.
    """
    run = _build(config)
    if run.trainer.is_global_zero:
        keep_config(config, run.folder)
        keep_metrics(run.folder)
    _fit(config, run)
    results = _test(config, run) if config.test else {}
    if run.trainer.is_global_zero:
        if config.picture:
            draw_run(run.folder, _records(run.trainer))
        print_results(results, run.trainer, run.folder)
    if run.recorder is not None:
        _compare(config, run, run.recorder, results)


def _fit(config: DictConfig, run: _Run) -> None:
    path = checkpoint_to_resume(config.ckpt_path, run.trainer)
    with _explained(config, run):
        run.trainer.fit(run.model, datamodule=run.data, ckpt_path=path, weights_only=config.weights_only)


def _test(config: DictConfig, run: _Run) -> Mapping[str, float]:
    if not is_overridden("test_step", run.model) or not is_overridden("test_dataloader", run.data):
        rank_zero_info("Not tested: the model has no `test_step`, or the data no `test_dataloader`.")
        return {}
    keep_weights_for_testing(run.trainer)
    with _explained(config, run):
        return merge_results(run.trainer.test(run.model, datamodule=run.data, verbose=False))


@contextmanager
def _explained(config: DictConfig, run: _Run) -> Iterator[None]:
    """Let the command end with one line where that says what is wrong."""
    try:
        yield
    except Exception as error:
        if config.weights_only and isinstance(error, UnpicklingError) and is_refusal(error):
            error = refusal(str(run.trainer.ckpt_path), error)
        if isinstance(error, CheckpointRefusedError) and error.names:
            raise LaunchError(f"{error.problem} Set `weights_only=false` if you trust whoever wrote it.") from None
        if not _is_mistake(error, run):
            raise
        raise LaunchError(str(error)) from error


def _is_mistake(error: Exception, run: _Run) -> bool:
    """Tell a wrong setting, which one line explains, from an error of the user's code, which needs its traceback."""
    if isinstance(error, _EXPLAINED):
        return True
    if run.summary.has_begun:
        return False
    parts = (run.model, run.data, *run.trainer.callbacks, *run.trainer.loggers)  # type: ignore[attr-defined]
    theirs = {type(part).__module__.partition(".")[0] for part in parts} - set(_NOT_THEIRS)
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return not any(frame.f_globals.get("__name__", "").partition(".")[0] in theirs for frame in frames)


def _compare(config: DictConfig, run: _Run, recorder: BatchRecorder, results: Mapping[str, float]) -> None:
    """Train once more in one process, on rank 0, and print both."""
    if dist.is_initialized():
        dist.destroy_process_group()  # metrics would synchronise through it
    if run.trainer.is_global_zero:
        rank_zero_info("Training once more in one process, on the same batches.")
        with _explained(config, run):
            print_comparison(results, train_alone(config, run.trainer, recorder))


def _build(config: DictConfig) -> _Run:
    try:
        OmegaConf.resolve(config)
        hydra = HydraConfig.get()
        choices: Any = hydra.runtime.choices
        prepare_config(config, choices)
        check_slurm(config)
        seed_everything(config.seed, workers=True, verbose=False)
        strategy = instantiate(config.strategy)
        model = make(config.model, "model", LightningModule)
        data = make(config.data, "data", LightningDataModule)
        callbacks = _wanted(make_all(config.callbacks, "callbacks", Callback), config.trainer)
        loggers = make_all(config.logger, "logger", Logger)
        folder = Path(hydra.runtime.output_dir)
        root = Path(config.trainer.default_root_dir or folder)
        recorder = BatchRecorder() if _wants_reference(config, model, data) else None
        summary = LaunchSummary(folder, str(choices.strategy))
        plugins = make_plugins(config)
        trainer = instantiate(
            config.trainer,
            _convert_="all",  # Lightning takes dictionaries and lists, not what OmegaConf has for them
            plugins=plugins,
            strategy=strategy,
            callbacks=[summary, *callbacks, *([recorder] if recorder else [])],
            logger=loggers or False,
            default_root_dir=str(root),
        )
        check_run(config, hydra, trainer, plugins)
        if has_network_settings(config):
            check_meeting(trainer, config.strategy)
    except Exception as error:
        # Whatever a constructor raises, the run has not started: the command prints it as one message.
        raise LaunchError(str(error)) from error
    return _Run(trainer, model, data, folder, recorder, summary)


def _wants_reference(config: DictConfig, model: LightningModule, data: LightningDataModule) -> bool:
    """Tell whether to train once more in one process; refuse what that cannot repeat."""
    wanted = config.data.get("train_fractions") is not None if config.reference is None else config.reference
    if not wanted:
        return False
    if has_started_before():
        rank_zero_info("No reference: it trains from the beginning, and this job has been put into the queue again.")
        return False
    reason = None
    if not config.test:
        reason = "compares the results of the test, and `test=false` is set"
    elif config.ckpt_path is not None:
        reason = "trains from the beginning, and `ckpt_path` resumes"
    elif config.strategy.get("start_method", "popen") != "popen":
        reason = f"needs processes that outlive training, and `start_method={config.strategy.start_method}` ends them"
    elif _changes_batches(model, data):
        reason = "would change batches twice: `on_before_batch_transfer` or `on_after_batch_transfer` is overridden"
    if reason is not None and config.reference:
        raise LaunchError(f"`reference=true` {reason}. Set `reference=false`.")
    return reason is None


def _changes_batches(model: LightningModule, data: LightningDataModule) -> bool:
    hooks = ("on_before_batch_transfer", "on_after_batch_transfer")
    return any(is_overridden(hook, source) for hook in hooks for source in (model, data))


def _wanted(callbacks: list[Callback], trainer: DictConfig) -> list[Callback]:
    """Leave out the callbacks that the Trainer is told to do without."""
    unwanted: tuple[type[Callback], ...] = ()
    if trainer.enable_progress_bar is False:
        unwanted += (ProgressBar,)
    if trainer.enable_checkpointing is False:
        unwanted += (ModelCheckpoint,)
    return [callback for callback in callbacks if not isinstance(callback, unwanted)]


def _records(trainer: Trainer) -> list[Any]:
    reports = [callback for callback in trainer.callbacks if isinstance(callback, BalanceReport)]  # type: ignore[attr-defined]
    return [record for report in reports for record in report.records]

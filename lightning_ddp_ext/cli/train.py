"""The main job: build what the configuration describes, train, test, and leave the results in the run folder."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_ddp_ext._compat.lightning import keep_weights_for_testing
from lightning_ddp_ext.callbacks import BalanceReport
from lightning_ddp_ext.cli.checks import check_hosts, check_settings, make, make_all
from lightning_ddp_ext.cli.picture import draw_run
from lightning_ddp_ext.cli.preflight import (
    check_folder,
    check_launcher,
    check_meeting,
    check_single_tasks,
    check_slurm,
    has_process_group,
)
from lightning_ddp_ext.cli.problems import LaunchError
from lightning_ddp_ext.cli.reference import BatchRecorder, merge_results, train_alone
from lightning_ddp_ext.cli.run_folder import checkpoint_to_resume, keep_config, keep_metrics, preemption_checkpoints
from lightning_ddp_ext.cli.summary import LaunchSummary, print_comparison, print_results
from lightning_ddp_ext.data.fraction_sampler import check_fractions
from lightning_ddp_ext.errors import CheckpointRefusedError, DDPExtError
from lightning_ddp_ext.integration.checkpoints.checkpoint_loading import is_refusal, refusal
from lightning_ddp_ext.strategies.ddp_join import DDPJoinStrategy

_SINGLE = "single"

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
    results = _test(run) if config.test else {}
    if run.trainer.is_global_zero:
        if config.picture:
            draw_run(run.folder, _records(run.trainer))
        print_results(results, run.trainer, run.folder)
    if run.recorder is not None:
        _compare(config, run, run.recorder, results)


def _fit(config: DictConfig, run: _Run) -> None:
    path = checkpoint_to_resume(config.ckpt_path, run.trainer)
    try:
        run.trainer.fit(run.model, datamodule=run.data, ckpt_path=path, weights_only=config.weights_only)
    except Exception as error:
        if config.weights_only and isinstance(error, UnpicklingError) and is_refusal(error):
            error = refusal(config.ckpt_path, error)
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
        print_comparison(results, train_alone(config, run.trainer, recorder))


def _test(run: _Run) -> Mapping[str, float]:
    if not is_overridden("test_step", run.model) or not is_overridden("test_dataloader", run.data):
        rank_zero_info("Not tested: the model has no `test_step`, or the data no `test_dataloader`.")
        return {}
    keep_weights_for_testing(run.trainer)
    return merge_results(run.trainer.test(run.model, datamodule=run.data, verbose=False))


def _build(config: DictConfig) -> _Run:
    try:
        OmegaConf.resolve(config)
        choices: Any = HydraConfig.get().runtime.choices
        check_groups(config, choices)
        set_devices(config, choices)
        check_settings(config)
        check_slurm(config)
        seed_everything(config.seed, workers=True, verbose=False)
        strategy = instantiate(config.strategy)
        model = make(config.model, "model", LightningModule)
        data = make(config.data, "data", LightningDataModule)
        callbacks = _wanted(make_all(config.callbacks, "callbacks", Callback), config.trainer)
        loggers = make_all(config.logger, "logger", Logger)
        folder = Path(HydraConfig.get().runtime.output_dir)
        root = Path(config.trainer.default_root_dir or folder)
        recorder = BatchRecorder() if _wants_reference(config, model, data, root) else None
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
        check_hosts(trainer)
        _check_fractions(config, choices, trainer)
        if has_process_group(config):
            check_meeting(trainer, config.strategy)
        check_single_tasks(plugins, choices.strategy, trainer)
        check_launcher(config, choices.strategy)
        check_folder(config, HydraConfig.get(), trainer)
    except Exception as error:
        # Whatever a constructor raises, the run has not started: the command prints it as one message.
        raise LaunchError(str(error)) from error
    return _Run(trainer, model, data, folder, recorder, summary)


def _wants_reference(config: DictConfig, model: LightningModule, data: LightningDataModule, root: Path) -> bool:
    """Tell whether to train once more in one process; refuse what that cannot repeat."""
    wanted = config.data.get("train_fractions") is not None if config.reference is None else config.reference
    if not wanted:
        return False
    if preemption_checkpoints(root):
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


def _check_fractions(config: DictConfig, choices: Any, trainer: Trainer) -> None:
    fractions = config.data.get("train_fractions")
    if fractions is None:
        return
    check_fractions(fractions, trainer.world_size)
    if len(set(fractions)) > 1 and not isinstance(trainer.strategy, DDPJoinStrategy):
        raise LaunchError(
            f"`data.train_fractions={list(fractions)}` gives processes different numbers of batches, and"
            f" `strategy={choices.strategy}` needs equally many. Use `strategy=ddp_join`."
        )


def make_plugins(config: DictConfig) -> list[Any] | None:
    """Add the cluster to the Trainer's plugins, if it is one that has to be told.

    Args:
        config: The composed configuration.

    Returns:
        The plugins; None for none.
    """
    plugins = config.trainer.plugins
    if "_target_" not in config.cluster:
        return plugins  # type: ignore[no-any-return]
    own = [] if plugins is None else list(plugins) if isinstance(plugins, ListConfig) else [plugins]
    own = [instantiate(plugin) if isinstance(plugin, DictConfig) else plugin for plugin in own]
    return [*own, instantiate(config.cluster)]


def _wanted(callbacks: list[Callback], trainer: DictConfig) -> list[Callback]:
    """Leave out the callbacks that the Trainer is told to do without."""
    unwanted: tuple[type[Callback], ...] = ()
    if trainer.enable_progress_bar is False:
        unwanted += (ProgressBar,)
    if trainer.enable_checkpointing is False:
        unwanted += (ModelCheckpoint,)
    return [callback for callback in callbacks if not isinstance(callback, unwanted)]


def check_groups(config: DictConfig, choices: Any) -> None:
    """Refuse settings that would be ignored.

    Args:
        config: The composed configuration.
        choices: The options that were chosen, by group.

    Raises:
        LaunchError: If there are any.
    """
    path = config.ckpt_path
    if path not in (None, "last", "best", "hpc") and "://" not in path and not Path(path).exists():
        raise LaunchError(f"`ckpt_path={path}` does not exist. Give the path of a checkpoint, or `last`.")
    for key in {"strategy", "callbacks", "logger"} & set(config.trainer):
        raise LaunchError(f"`trainer.{key}` has no effect. Use the group `{key}` instead.")
    for group, key in {"network": "network_interface", "process_group": "process_group_backend"}.items():
        if config[group] is not None and key not in config.strategy:
            raise LaunchError(
                f"`{group}={choices[group]}` is set, but `strategy={choices.strategy}` runs in one process and has no"
                f" {group.replace('_', ' ')}. Leave it out, or choose `strategy=ddp` or `strategy=fsdp`."
            )


def set_devices(config: DictConfig, choices: Any) -> None:
    """Fill in accelerator and devices where they are left open.

    Args:
        config: The composed configuration, which is changed.
        choices: The options that were chosen, by group.

    Raises:
        LaunchError: If the strategy has one device, and there are to be several.
    """
    trainer = config.trainer
    single = choices.strategy == _SINGLE
    if trainer.accelerator is None:
        trainer.accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if trainer.devices is None:
        uses_gpus = trainer.accelerator in ("cuda", "gpu") or (
            trainer.accelerator == "auto" and torch.cuda.is_available()
        )
        several = torch.cuda.device_count() if uses_gpus else 2
        trainer.devices = 1 if single else several
    if single and trainer.num_nodes not in (1, "1", None):
        raise LaunchError(
            f"`strategy=single` runs on one node, got `trainer.num_nodes={trainer.num_nodes}`. Leave it out, or choose"
            " `strategy=ddp`."
        )
    if single and trainer.devices not in (1, "1"):
        raise LaunchError(f"`strategy=single` uses one device, got `trainer.devices={trainer.devices}`. Leave it out.")


def _records(trainer: Trainer) -> list[Any]:
    reports = [callback for callback in trainer.callbacks if isinstance(callback, BalanceReport)]  # type: ignore[attr-defined]
    return [record for report in reports for record in report.records]

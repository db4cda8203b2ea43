"""One run: train and test, or evaluate a checkpoint, and write the results into the run folder."""

import itertools
import json
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_ddp_ext._compat.lightning import keep_weights_for_testing
from lightning_ddp_ext._import_names import LIBRARIES
from lightning_ddp_ext._lightning import (
    BasePredictionWriter,
    Callback,
    LightningDataModule,
    LightningModule,
    Logger,
    MisconfigurationException,
    ModelCheckpoint,
    ProgressBar,
    Trainer,
    is_overridden,
    rank_zero_info,
    rank_zero_warn,
    seed_everything,
)
from lightning_ddp_ext._output import logged_numbers
from lightning_ddp_ext._validation import check_choice
from lightning_ddp_ext.cli.run_report import LaunchSummary, draw_run, print_results
from lightning_ddp_ext.cli.settings import LaunchError, instantiate
from lightning_ddp_ext.cli.validate import check_run, make, make_all, make_trainer, prepare_config
from lightning_ddp_ext.errors import CheckpointRefusedError, DDPExtError
from lightning_ddp_ext.resume.loading import TAKES_WEIGHTS_ONLY, WeightsOnlyLoadMixin, check_checkpoint

RESULTS = "results.json"  # in the run folder
# The step of the model and the loader of the data that a mode needs; there is a default `predict_step`.
_NEEDED = {
    "validate": ("validation_step", "val_dataloader"),
    "test": ("test_step", "test_dataloader"),
    "predict": (None, "predict_dataloader"),
}
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
    summary: LaunchSummary


def train(config: DictConfig) -> float | None:
    """Run what `mode` says, and return `optimized_metric` on rank 0.

    A LaunchError is the one message of a run that cannot start.
    """
    run = _build(config)
    trainer = run.trainer
    if trainer.is_global_zero:
        keep_config(config, run.folder)
        _keep_metrics(run.folder)
    trained: dict[str, float] = {}
    if config.mode == "train":
        _fit(config, run)
        trained = logged_numbers(trainer)
        evaluated = _test(config, run) if config.test else {}
    else:
        evaluated = _evaluate(config, run)
    if not trainer.is_global_zero:
        return None
    (run.folder / RESULTS).write_text(json.dumps({**trained, **evaluated}, indent=2))
    if config.plot and config.mode == "train":
        draw_run(run.folder, trainer, run.summary.title)
    print_results(evaluated, trainer, run.folder, run.summary.state)
    return read_metric(run.folder, config.optimized_metric)


def read_metric(folder: Path, name: str | None) -> float | None:
    """Return a result of a run that has ended, which a sweeper optimizes; None without a name."""
    if name is None:
        return None
    results: dict[str, float] = json.loads((folder / RESULTS).read_text())
    if name not in results:
        known = ", ".join(results) or "no value"
        raise LaunchError(f"`optimized_metric={name}` was not logged: the run has logged {known}. Use one of its keys.")
    return results[name]


def _build(config: DictConfig) -> _Run:
    try:
        check_choice("mode", config.mode, ["train", *_NEEDED], "Leave it out to train and test.")
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
        summary = LaunchSummary(folder, str(choices.strategy))
        trainer = make_trainer(
            config,
            strategy,
            callbacks=[summary, *callbacks],
            logger=loggers or False,
            default_root_dir=str(config.trainer.default_root_dir or folder),
        )
        check_run(config, hydra, trainer)
    except Exception as error:
        # Any error of a constructor: the run has not started, and the command prints one message.
        raise LaunchError(str(error)) from error
    return _Run(trainer, model, data, folder, summary)


def _enabled(callbacks: list[Callback], trainer: DictConfig) -> list[Callback]:
    """Drop the callbacks that the Trainer's `enable_*` arguments disable."""
    enabled = {ProgressBar: trainer.enable_progress_bar, ModelCheckpoint: trainer.enable_checkpointing}
    disabled = tuple(kind for kind, is_enabled in enabled.items() if is_enabled is False)
    return [callback for callback in callbacks if not isinstance(callback, disabled)]


def _fit(config: DictConfig, run: _Run) -> None:
    run.summary.resumes = path = checkpoint_to_resume(config.ckpt_path, run.trainer)
    with _explained(config, run):
        run.trainer.fit(run.model, datamodule=run.data, ckpt_path=path, **_loading(config, run, path))


def _loading(config: DictConfig, run: _Run, path: str | None) -> dict[str, bool]:
    """Check a checkpoint that the strategy would load unchecked, and return the options of loading it."""
    options = {"weights_only": config.weights_only} if TAKES_WEIGHTS_ONLY else {}
    if not options and not config.weights_only:
        raise LaunchError("`weights_only=false` needs Lightning 2.6. Install it, or leave this out.")
    if path is not None and not isinstance(run.trainer.strategy, WeightsOnlyLoadMixin):
        check_checkpoint(path, run.trainer.strategy.checkpoint_io, allows_code=not config.weights_only)
    return options


def _evaluate(config: DictConfig, run: _Run) -> Mapping[str, float]:
    """Validate, test or predict with the weights of `ckpt_path`."""
    mode, trainer, path = config.mode, run.trainer, config.ckpt_path
    missing = _find_missing(mode, run)
    if missing:
        raise LaunchError(f"`mode={mode}` needs a {' and a '.join(missing)}. Define it, or use another mode.")
    if mode == "predict" and not any(isinstance(one, BasePredictionWriter) for one in trainer.callbacks):  # type: ignore[attr-defined]
        raise LaunchError("`mode=predict` has no callback that keeps predictions. Set `callbacks=prediction_writer`.")
    if path is None:
        rank_zero_warn(f"`mode={mode}` without `ckpt_path` uses the weights with which the model is constructed.")
    arguments: dict[str, Any] = {"datamodule": run.data, "ckpt_path": path}
    with _explained(config, run):
        arguments |= _loading(config, run, path)
        if mode == "predict":
            trainer.predict(run.model, return_predictions=False, **arguments)
            return {}
        return merge_results(getattr(trainer, mode)(run.model, verbose=False, **arguments))


def _find_missing(mode: str, run: _Run) -> list[str]:
    """Return what model and data lack for a mode that evaluates, in words."""
    step, loader = _NEEDED[mode]
    needed = [(step, run.model, "model"), (loader, run.data, "data")]
    return [f"`{name}` of the {noun}" for name, part, noun in needed if name and not is_overridden(name, part)]


def _test(config: DictConfig, run: _Run) -> Mapping[str, float]:
    if _find_missing("test", run):
        rank_zero_info("Not tested: the model has no `test_step`, or the data no `test_dataloader`.")
        return {}
    keep_weights_for_testing(run.trainer)
    with _explained(config, run):
        return merge_results(run.trainer.test(run.model, datamodule=run.data, verbose=False))


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


def merge_results(by_loader: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the results of all test loaders, whose names Lightning makes distinct."""
    return {name: value for results in by_loader for name, value in results.items()}

"""The main job: build what the configuration describes, train, test, and leave the results in the run folder."""

import math
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
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
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import keep_weights_for_testing
from lightning_ddp_ext.callbacks import BalanceReport
from lightning_ddp_ext.cli.compare import BatchRecorder, Reference, merge_results, train_alone
from lightning_ddp_ext.cli.errors import LaunchError
from lightning_ddp_ext.cli.plots import draw_run
from lightning_ddp_ext.cli.validation import (
    check_meeting,
    check_run,
    check_slurm,
    has_network_settings,
    make,
    make_all,
    make_plugins,
    prepare_config,
)
from lightning_ddp_ext.errors import CheckpointRefusedError, DDPExtError
from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy
from lightning_ddp_ext.strategies.base import is_refusal, refusal


class LaunchSummary(Callback):
    """Prints what is about to run.

    Args:
        folder: Where the run is written.
        strategy: The name the strategy was chosen by.

    Attributes:
        has_begun: Whether a step has been about to run.
    """

    def __init__(self, folder: Path, strategy: str) -> None:
        self.has_begun = False
        self._folder = folder
        self._strategy = strategy

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.fit_loop.setup_data()
        if not trainer.is_global_zero:
            return
        table = _two_columns("Launch")
        table.add_row("strategy", self._strategy)
        per_process = getattr(trainer.train_dataloader, "batch_size", None)
        _add_devices(table, trainer, per_process)
        if per_process is not None:
            batch_size = per_process * trainer.world_size
            table.add_row("global batch size", str(batch_size))
            accumulated = f" ({trainer.accumulate_grad_batches} batches)" if trainer.accumulate_grad_batches > 1 else ""
            table.add_row("samples per optimizer step", f"{batch_size * trainer.accumulate_grad_batches}{accumulated}")
        _add_steps(table, trainer)
        table.add_row("run folder", str(_relative(self._folder)))
        Console().print(table)

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_begun = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_begun = True


def _add_devices(table: Table, trainer: Trainer, batch_size: int | None) -> None:
    strategy = trainer.strategy
    if not isinstance(strategy, BalancedDataParallelStrategy):
        processes = f"{trainer.world_size} process{'es' if trainer.world_size > 1 else ''}"
        table.add_row("devices", f"{processes} on {strategy.root_device.type}")
        return
    devices = strategy.devices
    chunks = [""] * len(devices) if batch_size is None else [f": {n} samples" for n in strategy.split_sizes(batch_size)]
    lines = [f"replica {i} on {device}{chunk}" for i, (device, chunk) in enumerate(zip(devices, chunks, strict=True))]
    table.add_row("devices", "\n".join(lines))


def _add_steps(table: Table, trainer: Trainer) -> None:
    batches = trainer.num_training_batches
    if math.isinf(batches):
        table.add_row("steps per epoch", "unknown: the loader has no length")
        return
    steps = math.ceil(batches / trainer.accumulate_grad_batches)
    table.add_row("steps per epoch", f"{steps} ({batches} batches)")
    of_ranks = getattr(trainer.train_dataloader, "lengths", None)
    if of_ranks is not None and len(set(of_ranks)) > 1:
        table.add_row("batches per epoch of each rank", ", ".join(str(min(length, batches)) for length in of_ranks))


def print_results(results: Mapping[str, float], trainer: Trainer, folder: Path) -> None:
    """Print the test results and what the run has left behind.

    Args:
        results: Test metrics by name.
        trainer: The trainer after the run.
        folder: Where the run was written.
    """
    table = _two_columns("Result")
    for name, value in sorted(results.items()):
        table.add_row(name, f"{value:.4f}")
    table.add_row("optimizer steps", str(trainer.global_step))
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = [name for name in files if not name.startswith(".")]
    table.add_row(f"in {_relative(folder)}", "\n".join(files))
    Console().print(table)


def print_comparison(results: Mapping[str, float], reference: Reference) -> None:
    """Print the test results beside those of one process.

    Args:
        results: Test metrics of the run by name.
        reference: What came of the same training in one process.
    """
    table = Table(title="The same batches in one process", title_justify="left")
    for column in ("", "this run", "one process", "difference"):
        table.add_column(column, justify="right" if column else "left", style="" if column else "bold")
    for name in sorted(results.keys() & reference.results.keys()):
        ours, theirs = results[name], reference.results[name]
        table.add_row(name, f"{ours:.4f}", f"{theirs:.4f}", f"{abs(ours - theirs):.1e}")
    table.add_row("all parameters, relative", "", "", f"{reference.difference:.1e}")
    if reference.precision != "64-true":
        table.caption = "Rounding errors grow with the steps; trainer.precision=64-true shows what else there is."
        table.caption_justify = "left"
    Console().print(table)


def _two_columns(title: str) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    return table


def _relative(folder: Path) -> Path:
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def keep_config(config: DictConfig, folder: Path) -> None:
    """Write the whole configuration down, for the owner only: it may hold keys from the environment."""
    path = folder / "config.yaml"
    path.touch(mode=0o600)
    path.chmod(0o600)  # also where there was one
    OmegaConf.save(config, path, resolve=True)


def keep_metrics(folder: Path) -> None:
    """Keep what a job has logged before it was requeued; Lightning's logger would delete it."""
    metrics = folder / "metrics.csv"
    if metrics.exists():
        kept = [int(number) for path in folder.glob("metrics-*.csv") if (number := path.stem[8:]).isdecimal()]
        metrics.rename(folder / f"metrics-{max(kept, default=0) + 1}.csv")


def checkpoint_to_resume(given: str | None, trainer: Trainer) -> str | None:
    """Choose what to go on from.

    Args:
        given: What the configuration asks for.
        trainer: The Trainer.

    Returns:
        That. For a job that SLURM has started again, the newer one of what it has left when it was preempted, `"hpc"`,
        and what its callbacks have saved last, `"last"`: a node may have failed since.
    """
    if not has_started_before():
        return given
    left = _newest(Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt"))
    saved = _newest(_last_checkpoints(trainer))
    if left > saved:
        return "hpc"
    # A path is from before. What is not on a mounted disk, only Lightning finds; it says so if there is nothing.
    return "last" if saved or given is None else given


def has_started_before() -> bool:
    """Tell whether this is a job that SLURM has put into the queue again."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0


def _last_checkpoints(trainer: Trainer) -> Iterator[Path]:
    """Go through what Lightning takes for `ckpt_path="last"`."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath:
            yield from Path(callback.dirpath).glob(f"{callback.CHECKPOINT_NAME_LAST}*{callback.FILE_EXTENSION}")


def _newest(paths: Iterable[Path]) -> float:
    """Return when the newest of some files was written; 0 if there is none."""
    return max((path.stat().st_mtime for path in paths), default=0.0)


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

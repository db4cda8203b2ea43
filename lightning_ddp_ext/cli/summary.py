"""What a run is going to do, and what came of it, as tables."""

import math
from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_ddp_ext.cli.reference import Reference
from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy


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

"""Output of the command: the tables at the start and at the end of a run, and the plot."""

import csv
import importlib.util
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_ddp_ext.callbacks import BalanceReport
from lightning_ddp_ext.callbacks.balance_report import ReplicaRecord
from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy

_SMOOTHED_OVER = 9  # batches


class LaunchSummary(Callback):
    """Prints the launch, and records in `has_begun` that training or validation has started."""

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
        table.add_row("devices", _describe_devices(trainer, per_process))
        if per_process is not None:
            batch_size = per_process * trainer.world_size
            table.add_row("global batch size", str(batch_size))
            accumulated = f" ({trainer.accumulate_grad_batches} batches)" if trainer.accumulate_grad_batches > 1 else ""
            table.add_row("samples per optimizer step", f"{batch_size * trainer.accumulate_grad_batches}{accumulated}")
        batches = trainer.num_training_batches
        if math.isinf(batches):
            table.add_row("steps per epoch", "unknown: the loader has no length")
        else:
            steps = math.ceil(batches / trainer.accumulate_grad_batches)
            table.add_row("steps per epoch", f"{steps} ({batches} batches)")
            lengths = getattr(trainer.train_dataloader, "lengths", None)
            if lengths is not None and len(set(lengths)) > 1:
                table.add_row("batches per epoch of each rank", ", ".join(str(min(n, batches)) for n in lengths))
        table.add_row("run folder", str(_relative(self._folder)))
        Console().print(table)

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_begun = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_begun = True


def _describe_devices(trainer: Trainer, batch_size: int | None) -> str:
    strategy = trainer.strategy
    if not isinstance(strategy, BalancedDataParallelStrategy):
        processes = f"{trainer.world_size} process{'es' if trainer.world_size > 1 else ''}"
        return f"{processes} on {strategy.root_device.type}"
    devices = strategy.devices
    chunks = [""] * len(devices) if batch_size is None else [f": {n} samples" for n in strategy.split_sizes(batch_size)]
    lines = [f"replica {i} on {device}{chunk}" for i, (device, chunk) in enumerate(zip(devices, chunks, strict=True))]
    return "\n".join(lines)


def print_results(results: Mapping[str, float], trainer: Trainer, folder: Path) -> None:
    """Print the test results and the files of the run folder."""
    table = _two_columns("Result")
    for name, value in sorted(results.items()):
        table.add_row(name, f"{value:.4f}")
    table.add_row("optimizer steps", str(trainer.global_step))
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = [name for name in files if not name.startswith(".")]
    table.add_row(f"in {_relative(folder)}", "\n".join(files))
    Console().print(table)


def print_comparison(
    results: Mapping[str, float], single: Mapping[str, float], difference: float, trainer: Trainer
) -> None:
    """Print the test results of the run beside the results of one process, and the difference of the parameters."""
    table = Table(title="The same batches in one process", title_justify="left")
    for column in ("", "this run", "one process", "difference"):
        table.add_column(column, justify="right" if column else "left", style="" if column else "bold")
    for name in sorted(results.keys() & single.keys()):
        ours, theirs = results[name], single[name]
        table.add_row(name, f"{ours:.4f}", f"{theirs:.4f}", f"{abs(ours - theirs):.1e}")
    table.add_row("all parameters, relative", "", "", f"{difference:.1e}")
    if trainer.precision != "64-true":
        table.caption = "Rounding errors grow with the steps; with trainer.precision=64-true they are much smaller."
        table.caption_justify = "left"
    Console().print(table)


def _two_columns(title: str) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    return table


def _relative(folder: Path) -> Path:
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def draw_run(folder: Path, trainer: Trainer) -> None:
    """Draw loss and metrics of `metrics.csv`, and the chunk and time of each replica, into `run.png`."""
    reports = [callback for callback in trainer.callbacks if isinstance(callback, BalanceReport)]  # type: ignore[attr-defined]
    records = [record for report in reports for record in report.records]
    curves = _read_curves(folder / "metrics.csv")
    if not (curves or records):
        return
    if importlib.util.find_spec("matplotlib") is None:
        warnings.warn("no plot: matplotlib is not installed. Install `lightning-ddp-ext[demo]`.", stacklevel=2)
        return
    from matplotlib.figure import Figure

    rows = 2 if records else 1
    figure = Figure(figsize=(11, 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False)
    for axis, title in zip(axes[0], ("loss", "metrics"), strict=True):
        _draw_curves(axis, {name: curve for name, curve in curves.items() if ("loss" in name) == (title == "loss")})
        axis.set(title=title, xlabel="optimizer step")
    if records:
        _draw_replicas(axes[1][0], axes[1][1], records)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "run.png", dpi=120)


def _read_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and name not in ("step", "epoch") and not name.startswith("replica_"):
                        curves[name].append((int(row["step"]), float(value)))
    return curves


def _draw_curves(axis: Any, curves: Mapping[str, list[tuple[int, float]]]) -> None:
    for name, points in sorted(curves.items()):
        marker = "o" if len(points) == 1 or "step" not in name else None
        axis.plot(*zip(*points, strict=True), label=name, marker=marker, markersize=3)
    if curves:
        axis.legend(fontsize="small", frameon=False)


def _draw_replicas(chunks: Any, times: Any, records: Sequence[ReplicaRecord]) -> None:
    """Draw the samples of each replica, stacked, and the running median of its times."""
    by_replica: dict[str, list[ReplicaRecord]] = defaultdict(list)
    for record in records:
        by_replica[f"replica {record.replica} ({record.device})"].append(record)
    batches = [record.batch for record in next(iter(by_replica.values()))]
    sizes = [[record.chunk for record in found] for found in by_replica.values()]
    chunks.stackplot(batches, sizes, labels=[*by_replica], step="mid", alpha=0.8)
    chunks.set(title="replicas: samples per batch, stacked", xlabel="batch")
    chunks.legend(fontsize="small", loc="lower left", framealpha=0.9)
    half = _SMOOTHED_OVER // 2
    for label, found in by_replica.items():
        seconds = [record.seconds for record in found]
        smoothed = [1000 * median(seconds[max(0, i - half) : i + half + 1]) for i in range(len(seconds))]
        times.plot(batches, smoothed, label=label)
    times.set(title=f"replicas: ms per batch, median of {_SMOOTHED_OVER}", xlabel="batch")
    times.set_ylim(bottom=0)
    times.legend(fontsize="small", frameon=False)

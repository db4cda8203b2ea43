"""Output of the command: the tables at the start and at the end of a run, and the plot."""

import csv
import importlib.util
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from rich.table import Table
from typing_extensions import override

from lightning_ddp_ext._lightning import Callback, LightningModule, Trainer, rank_zero_warn
from lightning_ddp_ext._output import print_table
from lightning_ddp_ext.callbacks import BalanceReport
from lightning_ddp_ext.strategies.balanced_ddp import BalancedDDPStrategy
from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy

_AROUND = 4  # batches on both sides of a running median


class LaunchSummary(Callback):
    """Prints the launch, and records in `has_begun` that training or validation has started."""

    def __init__(self, folder: Path, strategy: str) -> None:
        self.has_begun = False
        self.resumes: str | None = None  # the checkpoint that the run is to resume from
        self._folder = folder
        self._strategy = strategy

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.fit_loop.setup_data()
        if not trainer.is_global_zero:
            return
        source = trainer.ckpt_path or self.resumes
        if source == "last" and not trainer.strategy.restore_checkpoint_after_setup:  # FSDP looks for it later
            source = "none: training starts from the beginning"
            rank_zero_warn(
                "`ckpt_path=last` finds no checkpoint, and training starts from the beginning. To resume, set"
                " `hydra.run.dir` to the folder of the earlier run, or `ckpt_path` to a file."
            )
        table = two_columns("Launch")
        table.add_row("strategy", self._strategy)
        table.add_row("model", type(pl_module).__name__)
        table.add_row("data", type(trainer.datamodule).__name__)  # type: ignore[attr-defined]
        if source is not None:
            table.add_row("checkpoint", str(source))
        per_process = getattr(trainer.train_dataloader, "batch_size", None)
        table.add_row("devices", _describe_devices(trainer, per_process))
        if per_process is not None:
            is_shared = isinstance(trainer.strategy, BalancedDDPStrategy)
            batch_size = per_process * (1 if is_shared else trainer.world_size)
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
        print_table(table)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_begun = True

    on_sanity_check_start = on_train_start


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
    table = two_columns("Result")
    for name, value in sorted(results.items()):
        table.add_row(name, f"{value:.4f}")
    if trainer.global_step:
        table.add_row("optimizer steps", str(trainer.global_step))
    files = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.stat().st_size
    )
    files = [name for name in files if not name.startswith(".")]
    table.add_row(f"in {_relative(folder)}", "\n".join(files))
    print_table(table)


def two_columns(title: str) -> Table:
    """Return an empty table of names and values."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    return table


def _relative(folder: Path) -> Path:
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def draw_run(folder: Path, trainer: Trainer) -> None:
    """Draw loss and metrics of `metrics.csv`, and the chunk and time of each replica, into `run.png`."""
    panels = _read_panels(folder / "metrics.csv", trainer)
    if not any(panels.values()):
        return
    if importlib.util.find_spec("matplotlib") is None:
        warnings.warn("no plot: matplotlib is not installed. Run `pip install matplotlib`.", stacklevel=2)
        return
    from matplotlib.figure import Figure

    drawn = [title for title in panels if panels[title] or title in ("loss", "metrics")]
    figure = Figure(figsize=(11, 1.7 * len(drawn)), layout="constrained")
    for axis, title in zip(figure.subplots(len(drawn) // 2, 2).flat, drawn, strict=True):
        is_of_replicas = "replica" in title
        for name, points in sorted(panels[title].items()):
            steps, values = zip(*points, strict=True)
            if is_of_replicas:
                values = tuple(median(values[max(0, i - _AROUND) : i + _AROUND + 1]) for i in range(len(values)))
            marker = "o" if len(points) == 1 or not (is_of_replicas or "step" in name) else None
            axis.plot(steps, values, label=name, marker=marker, markersize=3)
        axis.set(title=title, xlabel="batch" if is_of_replicas else "optimizer step")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if panels[title]:
            axis.legend(fontsize="small", frameon=False)
    figure.savefig(folder / "run.png", dpi=120)


def _read_panels(path: Path, trainer: Trainer) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return the points of each curve, by the title of its panel and its name."""
    loss, metrics, samples, times = (defaultdict[str, list[tuple[int, float]]](list) for _ in range(4))
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and name not in ("step", "epoch") and not name.startswith("replica_"):
                        (loss if "loss" in name else metrics)[name].append((int(row["step"]), float(value)))
    reports = [callback for callback in trainer.callbacks if isinstance(callback, BalanceReport)]  # type: ignore[attr-defined]
    for record in (record for report in reports for record in report.records):
        name = f"replica {record.replica} ({record.device})"
        samples[name].append((record.batch, record.chunk))
        times[name].append((record.batch, 1000 * record.seconds))
    smoothed = f"median of {2 * _AROUND + 1} batches"
    return {
        "loss": loss,
        "metrics": metrics,
        f"samples of each replica, {smoothed}": samples,
        f"ms of each replica, {smoothed}": times,
    }

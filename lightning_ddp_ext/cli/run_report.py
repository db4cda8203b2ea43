"""Output of the command: the tables at the start and at the end of a run, and the plot."""

import csv
import importlib.util
import itertools
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table
from typing_extensions import override

from lightning_ddp_ext._lightning import Callback, LightningModule, Trainer, rank_zero_warn
from lightning_ddp_ext._output import print_table
from lightning_ddp_ext.callbacks import BalanceReport, JoinReport
from lightning_ddp_ext.callbacks.replica_consistency import hash_of_training
from lightning_ddp_ext.strategies.balanced_ddp import BalancedDDPStrategy
from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AROUND = 4  # batches on both sides of a running median
_DECADES = 30  # the loss is drawn on a logarithmic axis if it falls by this factor
_COLOURS = {"train": "tab:blue", "val": "tab:orange", "test": "tab:green"}
_STAGE = re.compile(r"(?:^|[_/])(train|val|test)")  # in the name of a logged value; without one, it is of training
_OF_REPORT = re.compile(r"(replica|rank)_\d+/")


class LaunchSummary(Callback):
    """Prints the launch, and records in `has_begun` that training or validation has started."""

    def __init__(self, folder: Path, strategy: str) -> None:
        self.has_begun = False
        self.resumes: str | None = None  # the checkpoint that the run is to resume from
        self.title = ""  # of the plot
        self.state: str | None = None  # hash of the training state at the end of training
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
        model, data = type(pl_module).__name__, type(trainer.datamodule).__name__  # type: ignore[attr-defined]
        table.add_row("model", model)
        table.add_row("data", data)
        self.title = f"{self._strategy}: {model}, {data}"
        if source is not None:
            table.add_row("checkpoint", str(source))
        per_process = getattr(trainer.train_dataloader, "batch_size", None)
        table.add_row("devices", _describe_devices(trainer, per_process))
        if per_process is not None:
            is_shared = isinstance(trainer.strategy, BalancedDDPStrategy)
            batch_size = per_process * (1 if is_shared else trainer.world_size)
            table.add_row("global batch size", str(batch_size))
            accumulated = f" ({trainer.accumulate_grad_batches} batches)" if trainer.accumulate_grad_batches > 1 else ""
            samples = batch_size * trainer.accumulate_grad_batches
            table.add_row("samples per optimizer step", f"{samples}{accumulated}")
            self.title += f", {samples} samples per optimizer step"
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

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.state = hash_of_training(trainer, pl_module)


def _describe_devices(trainer: Trainer, batch_size: int | None) -> str:
    strategy = trainer.strategy
    if not isinstance(strategy, BalancedDataParallelStrategy):
        processes = f"{trainer.world_size} process{'es' if trainer.world_size > 1 else ''}"
        return f"{processes} on {strategy.root_device.type}"
    devices = strategy.devices
    chunks = [""] * len(devices) if batch_size is None else [f": {n} samples" for n in strategy.split_sizes(batch_size)]
    lines = [f"replica {i} on {device}{chunk}" for i, (device, chunk) in enumerate(zip(devices, chunks, strict=True))]
    return "\n".join(lines)


def print_results(results: Mapping[str, float], trainer: Trainer, folder: Path, state: str | None = None) -> None:
    """Print the test results and the files of the run folder."""
    table = two_columns("Result")
    for name, value in sorted(results.items()):
        table.add_row(name, f"{value:.4f}")
    if trainer.global_step:
        table.add_row("optimizer steps", str(trainer.global_step))
    if state is not None:
        table.add_row("SHA-256 of training", state)
    written = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    # A logger's folder, which may hold many files, is one line.
    files = sorted({str(path) if path.parent.name in {"", "checkpoints"} else f"{path.parts[0]}/" for path in written})
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


@dataclass(slots=True)
class _Panel:
    """The points of each curve, by its name."""

    title: str
    x: str
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))


def draw_run(folder: Path, trainer: Trainer, title: str = "") -> None:
    """Draw loss and metrics of `metrics.csv`, and samples and times of each replica or rank, into `run.png`."""
    panels = [(panel, _draw_stages) for panel in _read_metrics(folder / "metrics.csv")]
    panels += [(panel, _draw_replicas) for panel in _read_reports(trainer)]
    if not any(panel.curves for panel, _ in panels):
        return
    if importlib.util.find_spec("matplotlib") is None:
        warnings.warn("no plot: matplotlib is not installed. Run `pip install matplotlib`.", stacklevel=2)
        return
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 0.4 + 1.7 * len(panels)), layout="constrained")
    figure.suptitle(title)
    for axis, (panel, draw) in zip(figure.subplots(len(panels) // 2, 2).flat, panels, strict=True):
        draw(axis, panel)
        axis.set(title=panel.title, xlabel=panel.x)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if panel.curves:
            axis.legend(fontsize="small", frameon=False)
    figure.savefig(folder / "run.png", dpi=120)


def _draw_stages(axis: "Axes", panel: _Panel) -> None:
    """Draw one colour for training, validation and test each, and the last value of the test as a star."""
    styles = {stage: itertools.cycle(["-", "--", "-.", ":"]) for stage in _COLOURS}
    for name, points in sorted(panel.curves.items(), key=lambda curve: (len(curve[1]) > 1, curve[0]), reverse=True):
        found = _STAGE.search(name)
        stage = found[1] if found else "train"
        options: dict[str, Any] = {"label": name, "color": _COLOURS[stage]}
        if stage == "test" or len(points) == 1:
            step, value = points[-1]
            axis.plot(step, value, "*", **options | {"label": f"{name}: {value:.4g}"}, markersize=12, zorder=3)
        else:
            if name.endswith("_step"):
                options |= {"alpha": 0.5, "linewidth": 1}
            else:
                options |= {"marker": "o", "markersize": 3, "linestyle": next(styles[stage])}
            axis.plot(*zip(*points, strict=True), **options)
    values = [value for points in panel.curves.values() for _, value in points]
    if panel.title == "loss" and values and max(values) > _DECADES * min(values) > 0:
        axis.set_yscale("log")


def _draw_replicas(axis: "Axes", panel: _Panel) -> None:
    marker = "o" if panel.x == "epoch" else None
    for number, (name, points) in enumerate(panel.curves.items()):
        colour = f"C{number + len(_COLOURS)}"  # none of the stages'
        axis.plot(*zip(*points, strict=True), label=name, color=colour, marker=marker, markersize=3)
    axis.set_ylim(bottom=0)


def _read_metrics(path: Path) -> list[_Panel]:
    loss, metrics = (_Panel(title, "optimizer step") for title in ("loss", "metrics"))
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and name not in ("step", "epoch") and not _OF_REPORT.match(name):
                        panel = loss if "loss" in name else metrics
                        panel.curves[name].append((int(row["step"]), float(value)))
    return [loss, metrics]


def _read_reports(trainer: Trainer) -> list[_Panel]:
    """Return samples and times of each replica in each batch, or of each rank in each epoch."""
    callbacks: Sequence[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for report in callbacks:
        if isinstance(report, BalanceReport) and report.records:
            noun = "rank" if isinstance(trainer.strategy, BalancedDDPStrategy) else "replica"
            smoothed = f"median of {2 * _AROUND + 1} batches"
            samples, times = (_Panel(f"{what} of each {noun}, {smoothed}", "batch") for what in ("samples", "ms"))
            for record in report.records:
                name = f"{noun} {record.replica} ({record.device})"
                samples.curves[name].append((record.batch, record.chunk))
                times.curves[name].append((record.batch, 1000 * record.seconds))
            for panel in (samples, times):
                panel.curves = {name: _smooth(points) for name, points in panel.curves.items()}
            return [samples, times]
    for report in callbacks:
        if isinstance(report, JoinReport) and report.records:
            samples, times = (_Panel(f"{what} of each rank", "epoch") for what in ("samples", "seconds without data"))
            for epoch in report.records:
                samples.curves[f"rank {epoch.rank}"].append((epoch.epoch, epoch.samples))
                times.curves[f"rank {epoch.rank}"].append((epoch.epoch, epoch.shadow_seconds))
            return [samples, times]
    return []


def _smooth(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    values = [value for _, value in points]
    return [(x, median(values[max(0, i - _AROUND) : i + _AROUND + 1])) for i, (x, _) in enumerate(points)]

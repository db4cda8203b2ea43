"""What each replica of `balanced_dp` was given, how long it took, and how long it waited for the others."""

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_ddp_ext._compat.loops import logs_now
from lightning_ddp_ext._validation import check_flag, check_path, check_picture
from lightning_ddp_ext.callbacks.plots import draw_balance
from lightning_ddp_ext.replicas.replicated_step import BatchRecord
from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy

_SUMMARISED = 50  # batches, the last ones


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """One replica's part in one training batch.

    Attributes:
        batch: Number of training batches before this one, over all epochs.
        replica: Index of the replica.
        device: Its device.
        chunk: Samples it had.
        seconds: Time it spent on them, forward and backward.
        idle_share: Part of the time that it waited for the slowest replica.
    """

    batch: int
    replica: int
    device: str
    chunk: int
    seconds: float
    idle_share: float


@dataclass(frozen=True, slots=True)
class ReplicaSummary:
    """One replica's part in the last training batches.

    Attributes:
        replica: Index of the replica.
        device: Its device.
        chunk: Median of the samples it had.
        seconds: Median of the time it spent.
        idle_share: Median of the part of the time that it waited for the slowest replica.
        peak_memory: Most bytes that were in use on its device; None on the CPU, whose memory replicas share.
    """

    replica: int
    device: str
    chunk: float
    seconds: float
    idle_share: float
    peak_memory: int | None


class BalanceReport(Callback):
    """Records for every training batch what each replica was given, how long it took and how long it waited.

    A table is printed when training ends, or is interrupted; the values are also logged with Lightning's own, every
    `log_every_n_steps`, as `replica_0/samples`, `replica_0/milliseconds`, `replica_0/idle_share` and so on. Under other
    strategies than `balanced_dp` it does nothing.

    Args:
        path: A CSV file to write when training ends; None writes none.
        picture: A picture to draw when training ends (PNG, SVG or PDF; needs matplotlib); None draws none.
        table: Whether to print the table.

    Attributes:
        records: What was recorded since training was started.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a path is that of a folder, or the suffix of `picture` is none of these.
    """

    def __init__(self, path: str | Path | None = None, picture: str | Path | None = None, table: bool = True) -> None:
        check_path("path", path)
        check_path("picture", picture)
        check_picture("picture", picture)
        check_flag("table", table)
        self.path = None if path is None else Path(path)
        self.picture = None if picture is None else Path(picture)
        self.records: list[ReplicaRecord] = []
        self._table = table
        self._batches = 0
        self._peaks: list[int | None] = []
        self._last: BatchRecord | None = None
        self._is_recording = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.records.clear()
        self._batches, self._peaks, self._last = 0, [], None
        self._is_recording = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._take_in(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(trainer.strategy, BalancedDataParallelStrategy):
            # Read before the next batch, not here: on CUDA, times are known when the device has finished.
            self._last = trainer.strategy.last_batch
            if trainer.loggers and logs_now(trainer):
                self._take_in(trainer)
                newest = self.records[-len(trainer.strategy.devices) :]
                pl_module.log_dict(_as_metrics(newest), on_step=True, on_epoch=False, batch_size=1)

    def _take_in(self, trainer: Trainer) -> None:
        last, self._last = self._last, None
        strategy = trainer.strategy
        if last is None or not isinstance(strategy, BalancedDataParallelStrategy):
            return
        seconds = last.seconds
        longest = max(seconds) or 1.0
        self.records.extend(
            ReplicaRecord(self._batches, replica, str(device), last.sizes[replica], spent, 1 - spent / longest)
            for replica, (device, spent) in enumerate(zip(strategy.devices, seconds, strict=True))
        )
        self._batches += 1

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        if not self._is_recording or not isinstance(trainer.strategy, BalancedDataParallelStrategy):
            return
        self._is_recording = False
        self._take_in(trainer)
        self._peaks = [
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
            for device in trainer.strategy.devices
        ]
        if not self.records:
            return
        if self.path is not None:
            _write(self.path, self.records)
        if self.picture is not None:
            draw_balance(self.picture, self.records)
        if self._table:
            Console().print(self.table())

    def summary(self) -> list[ReplicaSummary]:
        """Summarise the last 50 training batches, or as many as there were.

        Returns:
            One entry per replica; none before the first batch.
        """
        recent = [record for record in self.records if record.batch >= self._batches - _SUMMARISED]
        replicas = max((record.replica for record in recent), default=-1) + 1
        peaks = self._peaks or [None] * replicas
        return [_summarise([r for r in recent if r.replica == index], peaks[index]) for index in range(replicas)]

    def table(self) -> Table:
        """Return the summary as a table to print."""
        summaries = self.summary()
        batches = min(self._batches, _SUMMARISED)
        on_cpu = all(summary.peak_memory is None for summary in summaries)
        table = Table(title=f"Replicas, medians of the last {batches} batches", title_justify="left")
        for column in ("replica", "device", "samples", "time", "idle"):
            table.add_column(column, justify="left" if column == "device" else "right")
        table.add_column("peak memory", justify="right")
        for summary in summaries:
            peak = "shared" if summary.peak_memory is None else _gib(summary.peak_memory)
            table.add_row(
                str(summary.replica),
                summary.device,
                f"{summary.chunk:g}",
                f"{1000 * summary.seconds:.1f} ms",
                f"{summary.idle_share:.0%}",
                peak,
            )
        process = _peak_of_process()
        if on_cpu and process is not None:
            table.caption, table.caption_justify = f"peak memory of the process: {_gib(process)}", "left"
        return table


def _summarise(records: Sequence[ReplicaRecord], peak_memory: int | None) -> ReplicaSummary:
    return ReplicaSummary(
        replica=records[0].replica,
        device=records[0].device,
        chunk=median(record.chunk for record in records),
        seconds=median(record.seconds for record in records),
        idle_share=median(record.idle_share for record in records),
        peak_memory=peak_memory,
    )


def _as_metrics(records: Sequence[ReplicaRecord]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for record in records:
        metrics[f"replica_{record.replica}/samples"] = float(record.chunk)
        metrics[f"replica_{record.replica}/milliseconds"] = 1000 * record.seconds
        metrics[f"replica_{record.replica}/idle_share"] = record.idle_share
    return metrics


def _write(path: Path, records: Sequence[ReplicaRecord]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["batch", "replica", "device", "chunk", "seconds", "idle_share"])
        writer.writerows(
            [r.batch, r.replica, r.device, r.chunk, f"{r.seconds:.6f}", f"{r.idle_share:.3f}"] for r in records
        )


def _gib(number_of_bytes: int) -> str:
    return f"{number_of_bytes / 2**30:.2f} GiB"


def _peak_of_process() -> int | None:
    if sys.platform == "win32":
        return None
    import resource  # on Unix only

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

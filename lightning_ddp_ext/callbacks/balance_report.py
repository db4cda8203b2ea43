"""Chunk sizes, times and waiting of each replica of `balanced_dp`, as records, a CSV file and a table."""

import csv
import sys
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_loops import logs_now
from lightning_ddp_ext._devices import peak_memory, reports_memory
from lightning_ddp_ext._validation import check_flag, check_path
from lightning_ddp_ext.replicas.replicated_step import BatchRecord
from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy

_SUMMARISED = 50  # batches in the table, the last ones


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """One replica's part in one training batch.

    Attributes:
        batch: Number of training batches before this one, over all epochs.
        replica: Index of the replica.
        device: Its device.
        chunk: Number of samples.
        seconds: Time spent on the chunk, forward and backward.
        idle_share: Fraction of the time in which the replica waited for the slowest one.
    """

    batch: int
    replica: int
    device: str
    chunk: int
    seconds: float
    idle_share: float


class BalanceReport(Callback):
    """Records chunk size, time and idle share of each replica of `balanced_dp` for every training batch.

    A table is printed when training ends or is interrupted. Loggers receive the values every `log_every_n_steps` as
    `replica_0/samples`, `replica_0/milliseconds`, `replica_0/idle_share`, and so on for each replica. The callback does
    nothing under other strategies.

    Args:
        path: A CSV file to write when training ends, or None.
        table: Whether to print the table.

    Attributes:
        records: One `ReplicaRecord` for each batch and replica since training was started.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `path` is a folder.
    """

    def __init__(self, path: str | Path | None = None, table: bool = True) -> None:
        check_path("path", path)
        check_flag("table", table)
        self.path = None if path is None else Path(path)
        self.records: list[ReplicaRecord] = []
        self._table = table
        self._unread: deque[BatchRecord] = deque()
        self._is_recording = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.records.clear()
        self._unread.clear()
        self._is_recording = isinstance(trainer.strategy, BalancedDataParallelStrategy)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._record(trainer, waits=False)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(trainer.strategy, BalancedDataParallelStrategy):
            self._unread.append(trainer.strategy.last_batch)
            if trainer.loggers and logs_now(trainer):
                self._record(trainer)
                metrics: dict[str, float] = {}
                for record in self.records[-len(trainer.strategy.devices) :]:
                    metrics[f"replica_{record.replica}/samples"] = float(record.chunk)
                    metrics[f"replica_{record.replica}/milliseconds"] = 1000 * record.seconds
                    metrics[f"replica_{record.replica}/idle_share"] = record.idle_share
                pl_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)

    def _record(self, trainer: Trainer, waits: bool = True) -> None:
        """Record the batches that the devices have finished; if it waits for the devices, all batches."""
        while self._unread and (waits or self._unread[0].is_done()):
            assert isinstance(trainer.strategy, BalancedDataParallelStrategy)
            last, devices = self._unread.popleft(), trainer.strategy.devices
            longest = max(last.seconds) or 1.0
            batch = self.records[-1].batch + 1 if self.records else 0
            self.records.extend(
                ReplicaRecord(batch, replica, str(device), size, seconds, 1 - seconds / longest)
                for replica, (device, size, seconds) in enumerate(zip(devices, last.sizes, last.seconds, strict=True))
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        if not self._is_recording:
            return
        self._is_recording = False
        self._record(trainer)
        if not self.records:
            return
        if self.path is not None:
            self._write(self.path)
        if self._table:
            Console().print(self.table())

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["batch", "replica", "device", "chunk", "seconds", "idle_share"])
            writer.writerows(
                [r.batch, r.replica, r.device, r.chunk, f"{r.seconds:.6f}", f"{r.idle_share:.3f}"] for r in self.records
            )

    def table(self) -> Table:
        """Return a table of each replica's medians over the last 50 training batches, and of the peak memory."""
        batches = self.records[-1].batch + 1 if self.records else 0
        recent: dict[int, list[ReplicaRecord]] = defaultdict(list)
        for record in self.records:
            if record.batch >= batches - _SUMMARISED:
                recent[record.replica].append(record)
        title = f"Replicas, medians of the last {min(batches, _SUMMARISED)} batches"
        table = Table(title=title, title_justify="left")
        for column in ("replica", "device", "samples", "time", "idle", "peak memory"):
            table.add_column(column, justify="left" if column == "device" else "right")
        for replica, records in recent.items():
            device = records[0].device
            table.add_row(
                str(replica),
                device,
                f"{median(record.chunk for record in records):g}",
                f"{1000 * median(record.seconds for record in records):.1f} ms",
                f"{median(record.idle_share for record in records):.0%}",
                _gib(peak_memory(torch.device(device))) if reports_memory(torch.device(device)) else "shared",
            )
        devices = {torch.device(records[0].device) for records in recent.values()}
        if sys.platform != "win32" and not any(map(reports_memory, devices)):
            import resource  # on Unix only

            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            table.caption, table.caption_justify = f"peak memory of the process: {_gib(peak)}", "left"
        return table


def _gib(number_of_bytes: int) -> str:
    return f"{number_of_bytes / 2**30:.2f} GiB"

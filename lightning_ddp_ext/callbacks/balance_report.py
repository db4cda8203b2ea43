"""Chunk sizes, times and waiting of each replica of a batch that is divided, as records, a CSV file and a table."""

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
from lightning_ddp_ext.distributed.exchange import gather_objects
from lightning_ddp_ext.replicas.replicated_step import BatchRecord
from lightning_ddp_ext.strategies.balanced_ddp import BalancedDDPStrategy
from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy

_SUMMARISED = 50  # batches in the table, the last ones


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """One replica's part in one training batch; under `balanced_ddp`, a rank's part in one optimizer step.

    Attributes:
        batch: Number of training batches before this one, over all epochs.
        replica: Index of the replica, or the rank.
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
    """Records chunk size, time and idle share of each replica of `balanced_dp` or `balanced_ddp` for every batch.

    A table is printed when training ends or is interrupted. Loggers receive the values every `log_every_n_steps` as
    `replica_0/samples`, `replica_0/milliseconds`, `replica_0/idle_share`, and so on for each replica. The callback does
    nothing under other strategies.

    Under `balanced_ddp` every rank has the records of all ranks, and rank 0 prints, writes and logs. The time of a rank
    is its forward and backward pass, and its idle share results from these times: waiting for data or for the network
    is in neither. On accelerators, the last steps of a training may be missing.

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
        self._devices: list[str] = []  # of all ranks
        self._peaks: list[int | None] = []  # of the memory of all ranks, when training has ended

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.records.clear()
        self._unread.clear()
        self._devices, self._peaks = [], []
        if isinstance(trainer.strategy, BalancedDDPStrategy):
            self._devices = gather_objects(str(trainer.strategy.root_device))
        self._is_recording = isinstance(trainer.strategy, BalancedDataParallelStrategy | BalancedDDPStrategy)

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
                metrics = self._last_metrics(len(trainer.strategy.devices))
                pl_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)
        elif isinstance(trainer.strategy, BalancedDDPStrategy):
            has_new = self._record_ranks(trainer.strategy)
            if has_new and logs_now(trainer):
                # Not by `self.log`: rank 0 may have no sample, and then has the logged values of another rank.
                for logger in trainer.loggers:
                    logger.log_metrics(self._last_metrics(len(self._devices)), step=max(trainer.global_step - 1, 0))

    def _last_metrics(self, replicas: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for record in self.records[-replicas:]:
            metrics[f"replica_{record.replica}/samples"] = float(record.chunk)
            metrics[f"replica_{record.replica}/milliseconds"] = 1000 * record.seconds
            metrics[f"replica_{record.replica}/idle_share"] = record.idle_share
        return metrics

    def _record_ranks(self, strategy: BalancedDDPStrategy) -> bool:
        """Record the steps whose times have arrived from all ranks; return True if there are any."""
        steps = strategy.take_timed_steps()
        for step in steps:
            longest = max(step.seconds.values()) or 1.0
            for rank, device in enumerate(self._devices):
                size, seconds = sum(batch.sizes[rank] for batch in step.batches), step.seconds[rank]
                record = ReplicaRecord(step.batches[0].number, rank, device, size, seconds, 1 - seconds / longest)
                self.records.append(record)
        return bool(steps)

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
        if self._is_recording and self._devices:
            self._peaks = gather_objects(_own_peak(trainer.strategy.root_device))
        self._finish(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        if not self._is_recording:
            return
        self._is_recording = False
        self._record(trainer)
        if not self.records or not trainer.is_global_zero:
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
        replicas = len({record.replica for record in self.records})
        last = self.records[-_SUMMARISED * replicas :]
        recent: dict[int, list[ReplicaRecord]] = defaultdict(list)
        for record in last:
            recent[record.replica].append(record)
        number = len(last) // max(replicas, 1)
        title = f"{'Ranks' if self._devices else 'Replicas'}, medians of the last {number} batches"
        table = Table(title=title, title_justify="left")
        for column in ("rank" if self._devices else "replica", "device", "samples", "time", "idle", "peak memory"):
            table.add_column(column, justify="left" if column == "device" else "right")
        for replica, records in recent.items():
            device = records[0].device
            table.add_row(
                str(replica),
                device,
                f"{median(record.chunk for record in records):g}",
                f"{1000 * median(record.seconds for record in records):.1f} ms",
                f"{median(record.idle_share for record in records):.0%}",
                self._describe_memory(replica, torch.device(device)),
            )
        devices = {torch.device(records[0].device) for records in recent.values()}
        peak = None if self._devices or any(map(reports_memory, devices)) else _peak_of_process()
        if peak is not None:
            table.caption, table.caption_justify = f"peak memory of the process: {_gib(peak)}", "left"
        return table

    def _describe_memory(self, replica: int, device: torch.device) -> str:
        if self._devices:
            peak = self._peaks[replica] if self._peaks else None
            return "unknown" if peak is None else _gib(peak)
        return _gib(peak_memory(device)) if reports_memory(device) else "shared"


def _peak_of_process() -> int | None:
    if sys.platform == "win32":
        return None
    import resource  # on Unix only

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _own_peak(device: torch.device) -> int | None:
    """Return the most memory that this process has taken on its device, or on a CPU altogether."""
    return peak_memory(device) if reports_memory(device) else _peak_of_process()


def _gib(number_of_bytes: int) -> str:
    return f"{number_of_bytes / 2**30:.2f} GiB"

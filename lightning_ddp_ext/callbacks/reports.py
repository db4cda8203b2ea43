"""Reports on chunks, samples, times and idle time of each replica or rank, as records and a table."""

import csv
import sys
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_ddp_ext._compat.lightning_logging import logs_now
from lightning_ddp_ext._devices import peak_memory, reports_memory
from lightning_ddp_ext._lightning import Callback, LightningModule, Trainer, rank_zero_warn
from lightning_ddp_ext._output import above_progress_bar, print_table
from lightning_ddp_ext._validation import check_flag, check_path
from lightning_ddp_ext.distributed.exchange import gather_objects
from lightning_ddp_ext.replicas.replicated_step import BatchRecord
from lightning_ddp_ext.strategies.balanced_ddp import BalancedDDPStrategy
from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy

if TYPE_CHECKING:
    from rich.table import Table

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
            # Once per run: device names do not change, and records of all ranks need them.
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
            sizes = [sum(of_rank) for of_rank in zip(*(batch.sizes for batch in step.batches), strict=True)]
            seconds = [step.seconds[rank] for rank in range(len(sizes))]
            self._append(step.batches[0].number, self._devices, sizes, seconds)
        return bool(steps)

    def _record(self, trainer: Trainer, waits: bool = True) -> None:
        """Record the batches that the devices have finished; if it waits for the devices, all batches."""
        while self._unread and (waits or self._unread[0].is_done()):
            assert isinstance(trainer.strategy, BalancedDataParallelStrategy)
            last = self._unread.popleft()
            batch = self.records[-1].batch + 1 if self.records else 0
            self._append(batch, trainer.strategy.devices, last.sizes, last.seconds)

    def _append(self, batch: int, devices: Sequence[object], sizes: Sequence[int], seconds: Sequence[float]) -> None:
        longest = max(seconds) or 1.0
        parts = enumerate(zip(devices, sizes, seconds, strict=True))
        self.records += [
            ReplicaRecord(batch, n, str(one), size, own, 1 - own / longest) for n, (one, size, own) in parts
        ]

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_recording and self._devices:
            device = trainer.strategy.root_device  # on a CPU, the memory of the process counts
            # At the end only, so that no training step carries another message.
            self._peaks = gather_objects(peak_memory(device) if reports_memory(device) else _peak_of_process())
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
            print_table(self.table())

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["batch", "replica", "device", "chunk", "seconds", "idle_share"])
            writer.writerows(
                [r.batch, r.replica, r.device, r.chunk, f"{r.seconds:.6f}", f"{r.idle_share:.3f}"] for r in self.records
            )

    def table(self) -> "Table":
        """Return a table of each replica's medians over the last 50 training batches, and of the peak memory."""
        from rich.table import Table

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


def _gib(number_of_bytes: int) -> str:
    return f"{number_of_bytes / 2**30:.2f} GiB"


_LARGE_IDLE_SHARE = 0.2
_LOGGED = ("batches", "samples", "shadow_steps", "shadow_seconds")


@dataclass(slots=True)
class RankRecord:
    """The steps of one rank in one epoch."""

    epoch: int
    rank: int
    batches: int = 0
    samples: float = 0.0  # a batch whose samples cannot be counted adds 1
    shadow_steps: int = 0  # without data
    shadow_seconds: float = 0.0
    seconds: float = 0.0  # of all steps

    @property
    def idle_share(self) -> float:
        """Share of shadow steps in the time of all steps."""
        return self.shadow_seconds / self.seconds if self.seconds else 0.0


class JoinReport(Callback):
    """Records the batches, samples and shadow steps of each rank in every epoch, and the time they took.

    Rank 0 prints a table when training ends, and warns if a rank had no data for more than a fifth of an epoch. The
    callback costs two small collectives per epoch, and works under `ddp_join` and `balanced_ddp` only.

    Args:
        log: Whether to log the values of every epoch, as `rank_0/batches`, `rank_0/samples`, `rank_0/shadow_steps`,
            `rank_0/shadow_seconds` and so on.
        table: Whether to print the table.

    Attributes:
        records: A `RankRecord` for each epoch and rank since training was started, the same on every rank.

    Raises:
        TypeError: If an argument has another type.
    """

    def __init__(self, log: bool = False, table: bool = True) -> None:
        check_flag("log", log)
        check_flag("table", table)
        self.records: list[RankRecord] = []
        self._log = log
        self._table = table
        self._warned = False
        self._started = 0.0
        self._record: RankRecord | None = None  # of this rank in this epoch

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.records.clear()
        self._warned = False
        self._record = None

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not at the end of an epoch, when the progress bar of rank 0 reduces metrics before other callbacks run.
        self._gather(trainer)
        if isinstance(trainer.strategy, ExplicitDDPStrategy) and trainer.strategy.agrees:
            self._record = RankRecord(trainer.current_epoch, trainer.global_rank)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        record, strategy = self._record, trainer.strategy
        if record is None or not isinstance(strategy, ExplicitDDPStrategy):
            return
        seconds = time.perf_counter() - self._started
        record.seconds += seconds
        if strategy.is_shadow:
            record.shadow_steps += 1
            record.shadow_seconds += seconds
        else:
            record.batches += 1
            record.samples += strategy.count_samples(batch) or 1

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._gather(trainer)
        if self.records and self._table and trainer.is_global_zero:
            print_table(self.table())

    def _gather(self, trainer: Trainer) -> None:
        """Keep the records of all ranks in the last epoch."""
        if self._record is None:
            return
        # Once per epoch, at a point that all ranks reach also if they ran out of data at different times.
        newest = [RankRecord(**record) for record in gather_objects(asdict(self._record))]
        self._record = None
        self.records.extend(newest)
        self._warn(newest)
        if self._log:
            metrics = {f"rank_{one.rank}/{name}": float(getattr(one, name)) for one in newest for name in _LOGGED}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    def table(self) -> "Table":
        """Return the records as a table to print."""
        from rich.table import Table

        table = Table(title="Ranks", title_justify="left")
        for column in ("epoch", "rank", "batches", "samples", "shadow steps", "shadow seconds", "idle"):
            table.add_column(column, justify="right")
        for record in self.records:
            table.add_row(
                str(record.epoch) if record.rank == 0 else "",
                str(record.rank),
                str(record.batches),
                f"{record.samples:.0f}",
                str(record.shadow_steps),
                f"{record.shadow_seconds:.2f}",
                f"{record.idle_share:.0%}",
            )
        return table

    def _warn(self, newest: list[RankRecord]) -> None:
        idlest = max(newest, key=lambda record: record.idle_share)
        if self._warned or idlest.idle_share <= _LARGE_IDLE_SHARE:
            return
        self._warned = True
        with above_progress_bar():
            rank_zero_warn(
                f"rank {idlest.rank} had no data for {idlest.idle_share:.0%} of epoch {idlest.epoch}. Give it more of"
                " the data, or smaller batches, to save time; or drop the extra batches of other ranks by"
                ' `uneven_inputs="stop"`.'
            )

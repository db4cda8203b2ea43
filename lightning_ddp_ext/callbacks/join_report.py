"""What each rank of `ddp_join` trained on, and how long it had to wait for those with more data."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_ddp_ext._validation import check_flag, check_path, check_picture
from lightning_ddp_ext.callbacks.plots import draw_ranks
from lightning_ddp_ext.strategies.ddp_join import DDPJoinStrategy

_MUCH = 0.2  # of an epoch


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's part in one epoch.

    Attributes:
        epoch: The epoch.
        rank: The rank.
        batches: Batches it had.
        samples: Samples in these; batches whose samples cannot be counted count once.
        shadow_steps: Steps that it made without data.
        shadow_seconds: Time it spent in these.
        seconds: Time it spent in all steps.
    """

    epoch: int
    rank: int
    batches: int
    samples: int
    shadow_steps: int
    shadow_seconds: float
    seconds: float

    @property
    def idle_share(self) -> float:
        """Part of the time of all steps that it spent in shadow steps."""
        return self.shadow_seconds / self.seconds if self.seconds else 0.0


class JoinReport(Callback):
    """Counts for every epoch what each rank had: batches, samples, and shadow steps with the time they took.

    Rank 0 prints a table when training ends, and draws a picture if it is given a path. A warning says so when a rank
    had no data for more than a fifth of an epoch. It costs one collective of five numbers per epoch. Under other
    strategies than `ddp_join` it does nothing.

    Args:
        log: Whether to give the loggers the values of every epoch, as `rank_0/batches`, `rank_0/samples`,
            `rank_0/shadow_steps`, `rank_0/shadow_seconds` and so on.
        table: Whether to print the table.
        path: A picture to write when training ends: a timeline of the ranks. Needs matplotlib.

    Attributes:
        records: What was recorded since training was started, the same on every rank.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If the path is that of a folder, or of no picture (PNG, SVG or PDF).
    """

    def __init__(self, log: bool = False, table: bool = True, path: str | Path | None = None) -> None:
        check_flag("log", log)
        check_flag("table", table)
        check_path("path", path)
        check_picture("path", path)
        self.records: list[RankRecord] = []
        self._log = log
        self._table = table
        self._path = None if path is None else Path(path)
        self._warned = False
        self._started = 0.0
        self._epoch: int | None = None  # that is counted
        self._counts = [0.0] * 5  # batches, samples, shadow steps, seconds in these, seconds in all steps

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.records.clear()
        self._warned = False
        self._epoch = None

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not at the end of an epoch: progress bars reduce metrics there, on rank 0 before other callbacks' turn.
        self._take_in(trainer, pl_module)
        self._epoch, self._counts = trainer.current_epoch, [0.0] * 5

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not isinstance(trainer.strategy, DDPJoinStrategy):
            return
        seconds = time.perf_counter() - self._started
        if trainer.strategy.is_shadow:
            step = [0, 0, 1, seconds, seconds]
        else:
            step = [1, trainer.strategy.count_samples(batch) or 1, 0, 0, seconds]
        self._counts = [sum(pair) for pair in zip(self._counts, step, strict=True)]

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_in(trainer, pl_module)
        if not self.records or not trainer.is_global_zero:
            return
        if self._table:
            Console().print(self.table())
        if self._path is not None:
            draw_ranks(self._path, self.records)

    def _take_in(self, trainer: Trainer, module: LightningModule) -> None:
        """Tell all ranks what each of them did in the last epoch."""
        epoch, self._epoch = self._epoch, None
        if epoch is None or not isinstance(trainer.strategy, DDPJoinStrategy):
            return
        own = torch.tensor(self._counts, dtype=torch.float64, device=module.device)
        by_rank = [torch.empty_like(own) for _ in range(trainer.world_size)]
        dist.all_gather(by_rank, own)
        newest = [_record(epoch, rank, *counts.tolist()) for rank, counts in enumerate(by_rank)]
        self.records.extend(newest)
        self._warn(newest)
        if self._log:
            for logger in trainer.loggers:
                logger.log_metrics(_as_metrics(newest), step=trainer.global_step)

    def table(self) -> Table:
        """Return what was recorded as a table to print."""
        table = Table(title="Ranks", title_justify="left")
        for column in ("epoch", "rank", "batches", "samples", "shadow steps", "seconds in these", "idle"):
            table.add_column(column, justify="right")
        for record in self.records:
            table.add_row(
                str(record.epoch) if record.rank == 0 else "",
                str(record.rank),
                str(record.batches),
                str(record.samples),
                str(record.shadow_steps),
                f"{record.shadow_seconds:.2f}",
                f"{record.idle_share:.0%}",
            )
        return table

    def _warn(self, newest: list[RankRecord]) -> None:
        idlest = max(newest, key=lambda record: record.idle_share)
        if self._warned or idlest.idle_share <= _MUCH:
            return
        self._warned = True
        rank_zero_warn(
            f"rank {idlest.rank} had no data for {idlest.idle_share:.0%} of epoch {idlest.epoch}. Give it more of the"
            ' data, or smaller batches, if time matters; `uneven_inputs="stop"` leaves out what others have more.'
        )


def _record(
    epoch: int, rank: int, batches: float, samples: float, shadow_steps: float, shadow_seconds: float, seconds: float
) -> RankRecord:
    return RankRecord(epoch, rank, int(batches), int(samples), int(shadow_steps), shadow_seconds, seconds)


def _as_metrics(records: list[RankRecord]) -> dict[str, float]:
    return {
        f"rank_{record.rank}/{name}": float(getattr(record, name))
        for record in records
        for name in ("batches", "samples", "shadow_steps", "shadow_seconds")
    }

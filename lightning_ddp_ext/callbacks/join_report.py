"""Batches, samples and idle time of each rank of `ddp_join`."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_ddp_ext._validation import check_flag
from lightning_ddp_ext.distributed.exchange import gather_objects
from lightning_ddp_ext.strategies.ddp_join import DDPJoinStrategy

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
    callback costs two small collectives per epoch, and does nothing under other strategies than `ddp_join`.

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
        if isinstance(trainer.strategy, DDPJoinStrategy):
            self._record = RankRecord(trainer.current_epoch, trainer.global_rank)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        record, strategy = self._record, trainer.strategy
        if record is None or not isinstance(strategy, DDPJoinStrategy):
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
            Console().print(self.table())

    def _gather(self, trainer: Trainer) -> None:
        """Keep the records of all ranks in the last epoch."""
        if self._record is None:
            return
        newest = [RankRecord(**record) for record in gather_objects(asdict(self._record))]
        self._record = None
        self.records.extend(newest)
        self._warn(newest)
        if self._log:
            metrics = {f"rank_{one.rank}/{name}": float(getattr(one, name)) for one in newest for name in _LOGGED}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    def table(self) -> Table:
        """Return the records as a table to print."""
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
        rank_zero_warn(
            f"rank {idlest.rank} had no data for {idlest.idle_share:.0%} of epoch {idlest.epoch}. Give it more of the"
            " data, or smaller batches, to save time; or drop the extra batches of other ranks by"
            ' `uneven_inputs="stop"`.'
        )

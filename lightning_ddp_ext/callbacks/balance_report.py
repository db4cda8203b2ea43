"""What each replica of `balanced_dp` was given, and how long it took."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """One replica's part in one training batch.

    Attributes:
        batch: Number of training batches before this one, over all epochs.
        replica: Index of the replica.
        device: Its device.
        chunk: Samples it had.
        seconds: Time it spent on them, forward and backward.
    """

    batch: int
    replica: int
    device: str
    chunk: int
    seconds: float


class BalanceReport(Callback):
    """Records the chunk and the time of each replica for every training batch.

    Under other strategies than `balanced_dp` it records nothing.

    Args:
        path: A CSV file to write at the end of training; None writes none.

    Attributes:
        records: What was recorded so far.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.records: list[ReplicaRecord] = []
        self._batches = 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, BalancedDataParallelStrategy):
            parts = zip(strategy.devices, strategy.chunk_sizes, strategy.replica_seconds, strict=True)
            self.records.extend(
                ReplicaRecord(self._batches, replica, str(device), chunk, seconds)
                for replica, (device, chunk, seconds) in enumerate(parts)
            )
            self._batches += 1

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.path is not None and self.records:
            _write(self.path, self.records)


def _write(path: Path, records: Sequence[ReplicaRecord]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["batch", "replica", "device", "chunk", "seconds"])
        writer.writerows([r.batch, r.replica, r.device, r.chunk, f"{r.seconds:.6f}"] for r in records)

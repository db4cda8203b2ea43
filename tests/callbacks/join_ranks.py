"""What the ranks of the tests of `JoinReport` run."""

import csv
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPJoinStrategy
from lightning_ddp_ext.callbacks import JoinReport
from tests.parity import Classifier, dataset, quiet_trainer

SAMPLES = [22, 6]  # of each rank, in batches of 4


class Uneven(Classifier):
    """Has fewer samples on rank 1."""

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(SAMPLES[self.trainer.global_rank]), batch_size=4)


def report(folder: str) -> dict[str, Any]:
    """Train for two epochs; return what was recorded, logged and said."""
    callback = JoinReport(log=True)
    logger = CSVLogger(folder, name=None, version="")
    trainer = quiet_trainer(
        DDPJoinStrategy(process_group_backend="gloo"),
        2,
        precision="64-true",
        max_epochs=2,
        callbacks=[callback],
        logger=logger,
        use_distributed_sampler=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Uneven())
    rows = []
    if trainer.is_global_zero:
        with (Path(folder) / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["rank_0/batches"]]
    return {
        "records": [asdict(record) for record in callback.records],
        "idle": [record.idle_share for record in callback.records],
        "warnings": [str(one.message) for one in caught if "had no data" in str(one.message)],
        "rows": rows,
    }

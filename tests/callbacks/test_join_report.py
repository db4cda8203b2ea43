"""Records of two ranks with different amounts of data."""

import csv
import io
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPJoinStrategy
from lightning_ddp_ext.callbacks import JoinReport
from lightning_ddp_ext.callbacks.join_report import RankRecord
from tests.parity import Classifier, dataset, quiet_trainer
from tests.support.processes import run_processes

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


def test_every_rank_knows_what_each_rank_did(tmp_path, capsys):
    found = run_processes(report, 2, str(tmp_path), timeout=120)
    counted = [
        {name: record[name] for name in ("epoch", "rank", "batches", "samples", "shadow_steps")}
        for record in found[0]["records"]
    ]
    assert counted == [
        {"epoch": epoch, "rank": rank, "batches": batches, "samples": SAMPLES[rank], "shadow_steps": shadow_ranks}
        for epoch in range(2)
        for rank, (batches, shadow_ranks) in enumerate([(6, 0), (2, 4)])
    ]
    assert found[0]["records"] == found[1]["records"]
    for record, idle in zip(found[0]["records"], found[0]["idle"], strict=True):
        assert (record["shadow_seconds"] > 0) == (record["rank"] == 1)
        assert record["shadow_seconds"] <= record["seconds"]
        assert idle == pytest.approx(record["shadow_seconds"] / record["seconds"])
    (warning,) = found[0]["warnings"]
    assert warning.startswith("rank 1 had no data for")
    assert found[1]["warnings"] == []
    assert [float(row["rank_1/shadow_steps"]) for row in found[0]["rows"]] == [4, 4]
    printed = capsys.readouterr().out
    assert printed.count("shadow steps") == 1


def test_the_table_has_a_row_per_epoch_and_rank():
    report = JoinReport()
    report.records += [RankRecord(0, 0, 9, 72, 0, 0.0, 2.0), RankRecord(0, 1, 4, 30, 5, 0.5, 2.0)]
    console = Console(file=io.StringIO(), width=100)
    console.print(report.table())
    rows = [line.replace("│", " ").split() for line in console.file.getvalue().splitlines() if "%" in line]
    assert rows == [["0", "0", "9", "72", "0", "0.00", "0%"], ["1", "4", "30", "5", "0.50", "25%"]]


def test_nothing_is_recorded_under_other_strategies(capsys):
    report = JoinReport()
    quiet_trainer("auto", 1, max_epochs=1, callbacks=[report], precision="64-true").fit(
        Classifier(), DataLoader(dataset(8), batch_size=4)
    )
    assert report.records == []
    assert "shadow" not in capsys.readouterr().out

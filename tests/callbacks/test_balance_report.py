import csv
import io

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy
from lightning_ddp_ext.callbacks import BalanceReport
from tests.parity import Classifier, dataset, quiet_trainer


def fit(strategy, devices, report, **options):
    trainer = quiet_trainer(strategy, devices, precision="64-true", max_epochs=2, callbacks=[report], **options)
    trainer.fit(Classifier(), DataLoader(dataset(11), batch_size=8))


def test_chunk_and_time_of_every_replica_are_recorded_and_written(tmp_path, capsys):
    report = BalanceReport(tmp_path / "new" / "replicas.csv")
    fit(BalancedDataParallelStrategy(gpu0_batch_size=1), 3, report)
    assert [record.chunk for record in report.records] == [1, 4, 3, 1, 1, 1] * 2
    assert [record.batch for record in report.records] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert all(record.seconds > 0 for record in report.records)
    for batch in range(4):
        of_batch = [record for record in report.records if record.batch == batch]
        slowest = max(record.seconds for record in of_batch)
        assert [r.idle_share for r in of_batch] == pytest.approx([1 - r.seconds / slowest for r in of_batch])
    with report.path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["chunk"]) for row in rows] == [record.chunk for record in report.records]
    assert "medians of the last 4 batches" in capsys.readouterr().out


def test_the_table_says_what_replicas_did(capsys):
    report = BalanceReport(table=False)
    fit(BalancedDataParallelStrategy(gpu0_batch_size=0), 2, report)
    assert "medians" not in capsys.readouterr().out
    console = Console(file=io.StringIO(), width=100)
    console.print(report.table())
    idle, busy = (line.split() for line in console.file.getvalue().splitlines() if "cpu" in line)
    assert idle == ["│", "0", "│", "cpu", "│", "0", "│", "0.0", "ms", "│", "100%", "│", "shared", "│"]
    assert (busy[5], busy[10]) == ("5.5", "0%")  # batches of 8 and 3
    assert "peak memory of the process" in console.file.getvalue()
    fit(BalancedDataParallelStrategy(), 4, report)  # each training starts a new report
    assert len(report.records) == 16
    assert {record.replica for record in report.records} == {0, 1, 2, 3}


def test_values_are_logged_with_those_of_the_step(tmp_path):
    report = BalanceReport(table=False)
    logger = CSVLogger(tmp_path, name=None, version="")
    fit(BalancedDataParallelStrategy(split=[1, 3]), 2, report, logger=logger, log_every_n_steps=2)
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["replica_0/samples"]]
    # Batches of 8 and 3 in turn; Lightning logs every second step.
    assert [(row["step"], row["replica_0/samples"], row["replica_1/samples"]) for row in rows] == [
        ("1", "1.0", "2.0"),
        ("3", "1.0", "2.0"),
    ]
    assert all(float(row["replica_0/milliseconds"]) > 0 and row["loss_step"] for row in rows)


class Interrupting(Callback):
    def on_train_batch_end(self, *args):
        raise KeyboardInterrupt


def test_an_interrupted_training_is_reported(tmp_path, capsys):
    report = BalanceReport(tmp_path / "replicas.csv")
    trainer = quiet_trainer(
        BalancedDataParallelStrategy(), 2, precision="64-true", max_epochs=1, callbacks=[report, Interrupting()]
    )
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(Classifier(), DataLoader(dataset(11), batch_size=8))
    assert [record.chunk for record in report.records] == [4, 4]
    assert report.path.read_text().count("cpu") == 2
    assert "medians of the last 1 batches" in capsys.readouterr().out


def test_an_error_after_training_is_none_of_its_business(capsys):
    class Failing(Callback):
        def on_validation_start(self, *args):
            raise KeyError("late")

    report = BalanceReport()
    trainer = quiet_trainer(
        BalancedDataParallelStrategy(), 2, precision="64-true", max_epochs=1, callbacks=[report, Failing()]
    )
    loader = DataLoader(dataset(11), batch_size=8)
    trainer.fit(Classifier(), loader)
    assert "medians" in capsys.readouterr().out
    with pytest.raises(KeyError, match="late"):
        trainer.validate(BoringModel())
    assert "medians" not in capsys.readouterr().out


def test_other_strategies_record_nothing(tmp_path):
    report = BalanceReport(tmp_path / "replicas.csv")
    fit("auto", 1, report)
    assert report.records == []
    assert not report.path.exists()

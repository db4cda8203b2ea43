"""Reports of the replicas of `balanced_dp`, and of ranks with different amounts of data."""

import csv
import io
import warnings
from pathlib import Path

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy, BalancedDDPStrategy, DDPJoinStrategy
from lightning_ddp_ext.callbacks import BalanceReport, JoinReport
from lightning_ddp_ext.callbacks.reports import RankRecord
from tests.support.devices import accelerator
from tests.support.processes import run_processes
from tests.support.training import Classifier, dataset, quiet_trainer


def fit(strategy, devices, report, **options):
    trainer = quiet_trainer(strategy, devices, precision="64-true", max_epochs=2, callbacks=[report], **options)
    trainer.fit(Classifier(), DataLoader(dataset(11), batch_size=8))


def read_rows(path, column=None):
    """Return the rows of a CSV file, or those that have a value in a column."""
    with path.open() as file:
        return [row for row in csv.DictReader(file) if column is None or row[column]]


def printed_table(report):
    console = Console(file=io.StringIO(), width=100)
    console.print(report.table())
    return console.file.getvalue()


def check_idle_shares(records):
    """Compare the idle shares of the replicas or ranks with their times in one batch."""
    longest = max(record.seconds for record in records)
    assert longest > 0
    assert [one.idle_share for one in records] == pytest.approx([1 - one.seconds / longest for one in records])


def test_chunk_and_time_of_every_replica_are_recorded_and_written(tmp_path, capsys):
    report = BalanceReport(tmp_path / "new" / "replicas.csv")
    fit(BalancedDataParallelStrategy(gpu0_batch_size=1), 3, report)
    assert [record.chunk for record in report.records] == [1, 4, 3, 1, 1, 1] * 2
    assert [record.batch for record in report.records] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert all(record.seconds > 0 for record in report.records)
    for batch in range(4):
        check_idle_shares([record for record in report.records if record.batch == batch])
    assert [int(row["chunk"]) for row in read_rows(report.path)] == [record.chunk for record in report.records]
    assert "medians of the last 4 batches" in capsys.readouterr().out


@pytest.mark.cpu_only("replicas on CPUs share their memory")
def test_the_table_has_the_work_of_each_replica(capsys):
    report = BalanceReport(table=False)
    fit(BalancedDataParallelStrategy(gpu0_batch_size=0), 2, report)
    assert "medians" not in capsys.readouterr().out
    table = printed_table(report)
    idle, busy = (line.split() for line in table.splitlines() if "cpu" in line)
    assert idle == ["│", "0", "│", "cpu", "│", "0", "│", "0.0", "ms", "│", "100%", "│", "shared", "│"]
    assert (busy[5], busy[10]) == ("5.5", "0%")  # batches of 8 and 3
    assert "peak memory of the process" in table
    fit(BalancedDataParallelStrategy(), 4, report)  # each training starts a new report
    assert len(report.records) == 16
    assert {record.replica for record in report.records} == {0, 1, 2, 3}


def test_the_table_has_the_peak_of_each_device(virtual_devices):
    report = BalanceReport(table=False)
    fit(BalancedDataParallelStrategy(), 2, report)
    table = printed_table(report)
    rows = [line.split() for line in table.splitlines() if "virtual:" in line]
    assert [(row[3], row[-2]) for row in rows] == [("virtual:0", "GiB"), ("virtual:1", "GiB")]
    assert "peak memory of the process" not in table


def test_values_are_logged_with_those_of_the_step(tmp_path):
    report = BalanceReport(table=False)
    logger = CSVLogger(tmp_path, name=None, version="")
    fit(BalancedDataParallelStrategy(split=[1, 3]), 2, report, logger=logger, log_every_n_steps=2)
    rows = read_rows(tmp_path / "metrics.csv", "replica_0/samples")
    # Batches of 8 and 3 in turn; Lightning logs every second step.
    assert [(row["step"], row["replica_0/samples"], row["replica_1/samples"]) for row in rows] == [
        ("1", "1.0", "2.0"),
        ("3", "1.0", "2.0"),
    ]
    assert all(float(row["replica_0/milliseconds"]) > 0 and row["loss_step"] for row in rows)


SHARED = {"split": {"split": [1, 3]}, "accumulated": {"gpu0_batch_size": 0}}


def report_shares(folder):
    """Train two ranks on shared batches; return the records of each run."""
    found = {}
    for name, options in SHARED.items():
        callback, path = BalanceReport(Path(folder) / name / "replicas.csv"), Path(folder) / name
        logger = CSVLogger(path, name=None, version="")
        logging = {"logger": logger, "log_every_n_steps": 1, "accumulate_grad_batches": 1 + (name == "accumulated")}
        fit(BalancedDDPStrategy(**options), 2, callback, **logging)
        found[name] = callback.records
    return found


@pytest.mark.cpu_only("the table has the memory of processes")
def test_every_rank_records_the_shares_and_times_of_all_ranks(tmp_path, capsys):
    found = run_processes(report_shares, 2, str(tmp_path), timeout=120)
    assert found[0].keys() == found[1].keys() == SHARED.keys()
    chunks = {"split": [2, 6, 1, 2] * 2, "accumulated": [0, 11] * 2}
    batches = {"split": [0, 0, 1, 1, 2, 2, 3, 3], "accumulated": [0, 0, 2, 2]}
    for name in SHARED:
        records = found[0][name]
        assert records == found[1][name]
        assert [record.chunk for record in records] == chunks[name]
        assert [record.batch for record in records] == batches[name]
        assert [record.replica for record in records] == [0, 1] * (len(records) // 2)
        for pair in zip(records[::2], records[1::2], strict=True):
            check_idle_shares(pair)
        logged = read_rows(tmp_path / name / "metrics.csv", "replica_0/samples")
        assert [float(row[f"replica_{rank}/samples"]) for row in logged for rank in range(2)] == chunks[name]
        assert [int(row["chunk"]) for row in read_rows(tmp_path / name / "replicas.csv")] == chunks[name]
    assert {record.seconds for record in found[0]["accumulated"][::2]} == {0.0}  # rank 0 had no sample
    printed = capsys.readouterr().out
    assert printed.count("Ranks, medians of the last") == 2
    assert printed.count("GiB") == 4


class Failing(Callback):
    def __init__(self, hook, error):
        self.error = error
        setattr(self, hook, self.fail)

    def fail(self, *args):
        raise self.error


def test_an_interrupted_training_is_reported_and_an_error_after_training_is_not(tmp_path, capsys):
    loader = DataLoader(dataset(11), batch_size=8)
    options = {"precision": "64-true", "max_epochs": 1}
    report = BalanceReport(tmp_path / "replicas.csv")
    interrupting = Failing("on_train_batch_end", KeyboardInterrupt())
    trainer = quiet_trainer(BalancedDataParallelStrategy(), 2, callbacks=[report, interrupting], **options)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(Classifier(), loader)
    assert [record.chunk for record in report.records] == [4, 4]
    assert report.path.read_text().count(accelerator()) == 2
    assert "medians of the last 1 batches" in capsys.readouterr().out
    failing = Failing("on_validation_start", KeyError("late"))
    trainer = quiet_trainer(BalancedDataParallelStrategy(), 2, callbacks=[BalanceReport(), failing], **options)
    trainer.fit(Classifier(), loader)
    assert "medians" in capsys.readouterr().out
    with pytest.raises(KeyError, match="late"):
        trainer.validate(BoringModel())
    assert "medians" not in capsys.readouterr().out


SAMPLES = [22, 6]  # of each rank, in batches of 4


class Uneven(Classifier):
    """Has fewer samples on rank 1."""

    def train_dataloader(self):
        return DataLoader(dataset(SAMPLES[self.trainer.global_rank]), batch_size=4)


def report(folder):
    """Train for two epochs; return the records and the warnings."""
    callback = JoinReport(log=True)
    logger = CSVLogger(folder, name=None, version="")
    options = {"precision": "64-true", "max_epochs": 2, "callbacks": [callback], "use_distributed_sampler": False}
    trainer = quiet_trainer(DDPJoinStrategy(), 2, logger=logger, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Uneven())
    return callback.records, [str(one.message) for one in caught if "had no data" in str(one.message)]


def test_every_rank_records_the_steps_of_all_ranks(tmp_path, capsys):
    (records, (warning,)), (of_other_rank, warnings_of_other_rank) = run_processes(
        report, 2, str(tmp_path), timeout=120
    )
    counted = [(one.epoch, one.rank, one.batches, one.samples, one.shadow_steps) for one in records]
    assert counted == [(epoch, *of_rank) for epoch in range(2) for of_rank in ((0, 6, 22, 0), (1, 2, 6, 4))]
    assert records == of_other_rank
    for record in records:
        assert (record.shadow_seconds > 0) == (record.rank == 1)
        assert record.shadow_seconds <= record.seconds
        assert record.idle_share == pytest.approx(record.shadow_seconds / record.seconds)
    assert warning.startswith("rank 1 had no data for")
    assert warnings_of_other_rank == []
    rows = read_rows(tmp_path / "metrics.csv", "rank_0/batches")
    assert [float(row["rank_1/shadow_steps"]) for row in rows] == [4, 4]
    printed = capsys.readouterr().out
    assert printed.count("shadow steps") == 1


def test_the_table_has_a_row_per_epoch_and_rank():
    report = JoinReport()
    report.records += [RankRecord(0, 0, 9, 72, 0, 0.0, 2.0), RankRecord(0, 1, 4, 30, 5, 0.5, 2.0)]
    rows = [line.replace("│", " ").split() for line in printed_table(report).splitlines() if "%" in line]
    assert rows == [["0", "0", "9", "72", "0", "0.00", "0%"], ["1", "4", "30", "5", "0.50", "25%"]]


def test_nothing_is_recorded_under_other_strategies(tmp_path, capsys):
    for report in (BalanceReport(tmp_path / "replicas.csv"), JoinReport()):
        fit("auto", 1, report)
        assert report.records == []
    assert not list(tmp_path.iterdir())
    printed = capsys.readouterr().out
    assert "shadow" not in printed
    assert "medians" not in printed

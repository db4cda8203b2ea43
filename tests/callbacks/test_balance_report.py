import csv

from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy
from lightning_ddp_ext.callbacks import BalanceReport
from tests.parity import Classifier, dataset, quiet_trainer


def fit(strategy, devices, report):
    trainer = quiet_trainer(strategy, devices, precision="64-true", max_epochs=2, callbacks=[report])
    trainer.fit(Classifier(), DataLoader(dataset(11), batch_size=8))


def test_chunk_and_time_of_every_replica_are_recorded_and_written(tmp_path):
    report = BalanceReport(tmp_path / "new" / "replicas.csv")
    fit(BalancedDataParallelStrategy(gpu0_batch_size=1), 3, report)
    assert [record.chunk for record in report.records] == [1, 4, 3, 1, 1, 1] * 2
    assert [record.batch for record in report.records] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert all(record.seconds > 0 for record in report.records)
    with report.path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["chunk"]) for row in rows] == [record.chunk for record in report.records]


def test_other_strategies_record_nothing(tmp_path):
    report = BalanceReport(tmp_path / "replicas.csv")
    fit("auto", 1, report)
    assert report.records == []
    assert not report.path.exists()

import importlib.util

import pytest

from lightning_ddp_ext.callbacks.balance_report import ReplicaRecord
from lightning_ddp_ext.cli.plots import draw_run

RECORDS = [ReplicaRecord(batch, replica, "cpu", 4, 0.01, 0.0) for batch in range(20) for replica in range(2)]


def test_curves_and_replicas_are_drawn(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,epoch,train_loss,accuracy\n1,0,0.5,\n2,0,,0.9\n3,0,0.4,\n")
    assert draw_run(tmp_path, RECORDS).read_bytes().startswith(b"\x89PNG")


def test_nothing_is_drawn_where_there_is_nothing(tmp_path):
    assert draw_run(tmp_path, []) is None
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_a_warning_says_what_to_install(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    with pytest.warns(UserWarning, match=r"Install `lightning-ddp-ext\[demo\]`"):
        assert draw_run(tmp_path, RECORDS) is None

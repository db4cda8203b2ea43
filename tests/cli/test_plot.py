"""The plot of a run, `run.png`."""

import importlib.util
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from lightning_ddp_ext.callbacks import BalanceReport, JoinReport
from lightning_ddp_ext.callbacks.reports import RankRecord, ReplicaRecord
from lightning_ddp_ext.cli.run_report import draw_run


def draw(folder, monkeypatch, trainer):
    """Return the axes of the plot by title, and the title of the whole."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append((figure, path)))
    draw_run(folder, trainer, "ddp_join: Net")
    ((figure, path),) = drawn
    assert path == folder / "run.png"
    return {axis.get_title(): axis for axis in figure.axes}, figure.get_suptitle()


def labels_of(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_a_stage_has_one_colour_and_a_loss_over_decades_a_logarithmic_axis(tmp_path, monkeypatch):
    (tmp_path / "metrics.csv").write_text(
        "step,epoch,train_loss_step,train_loss_epoch,val_loss,test_loss,val/f1,rank_0/samples\n"
        "1,0,2.0,,,,,4\n2,0,,1.0,0.9,,0.1,4\n3,1,0.01,,,,,\n4,1,,0.1,0.3,,0.8,\n5,1,,,,0.25,,\n"
    )
    axes, title = draw(tmp_path, monkeypatch, SimpleNamespace(callbacks=[]))
    assert (title, list(axes)) == ("ddp_join: Net", ["loss", "metrics"])
    loss, metrics = axes.values()
    assert (loss.get_yscale(), metrics.get_yscale()) == ("log", "linear")
    lines = {line.get_label(): line for line in loss.get_lines()}
    assert labels_of(loss) == ["val_loss", "train_loss_step", "train_loss_epoch", "test_loss: 0.25"]
    assert lines["train_loss_step"].get_color() == lines["train_loss_epoch"].get_color()
    assert len({line.get_color() for line in loss.get_lines()}) == 3
    assert lines["test_loss: 0.25"].get_marker() == "*"
    assert metrics.get_lines()[0].get_color() == lines["val_loss"].get_color()
    assert labels_of(metrics) == ["val/f1"]  # not the values of a report
    assert all(tick == int(tick) for tick in loss.get_xticks())


def test_a_loss_that_reaches_zero_is_drawn_on_a_linear_axis(tmp_path, monkeypatch):
    (tmp_path / "metrics.csv").write_text("step,epoch,loss\n1,0,2.0\n2,0,0.0\n")
    axes, _ = draw(tmp_path, monkeypatch, SimpleNamespace(callbacks=[]))
    assert axes["loss"].get_yscale() == "linear"


def test_samples_and_waits_of_the_ranks_are_drawn(tmp_path, monkeypatch):
    balance, join = BalanceReport(), JoinReport()
    trainer = SimpleNamespace(callbacks=[balance, join], strategy=None)
    join.records = [RankRecord(epoch, rank, samples=8 - rank) for epoch in range(3) for rank in (0, 1)]
    axes, _ = draw(tmp_path, monkeypatch, trainer)
    assert list(axes) == ["loss", "metrics", "samples of each rank", "seconds without data of each rank"]
    assert [list(line.get_ydata()) for line in axes["samples of each rank"].get_lines()] == [[8] * 3, [7] * 3]
    balance.records = [ReplicaRecord(batch, replica, "cpu", 4, 0.01, 0.0) for batch in range(20) for replica in (0, 1)]
    axes, _ = draw(tmp_path, monkeypatch, trainer)
    assert labels_of(axes["samples of each replica, median of 9 batches"]) == ["replica 0 (cpu)", "replica 1 (cpu)"]


def test_a_plot_needs_values_and_matplotlib(tmp_path, monkeypatch):
    draw_run(tmp_path, SimpleNamespace(callbacks=[]))
    assert not list(tmp_path.iterdir())
    (tmp_path / "metrics.csv").write_text("step,epoch,train_loss,accuracy\n1,0,0.5,\n2,0,,0.9\n3,0,0.4,\n")
    trainer, find_spec = SimpleNamespace(callbacks=[]), importlib.util.find_spec
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
        with pytest.warns(UserWarning, match="Run `pip install matplotlib`"):
            draw_run(tmp_path, trainer)
    draw_run(tmp_path, trainer)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")

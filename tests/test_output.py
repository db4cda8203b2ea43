"""Tables and messages on a terminal that shows a progress bar, as a person sees them."""

import io
import logging
import re
import sys

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch.utils.data import DataLoader

from lightning_ddp_ext import BalancedDataParallelStrategy, DDPJoinStrategy
from lightning_ddp_ext._import_names import NAMES
from lightning_ddp_ext.callbacks import BalanceReport, JoinReport
from tests.support.training import Classifier, dataset, quiet_trainer


class Terminal(io.StringIO):
    """A terminal that moves its cursor and erases lines as it is told to."""

    encoding = "utf-8"

    def isatty(self):
        return True

    def screen(self):
        """Return the lines that are left on the screen."""
        lines, row, column = [[]], 0, 0
        for token in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|[^\x1b]", self.getvalue()):
            if token == "\n":
                row, column = row + 1, 0
                lines += [[]] * (row + 1 - len(lines))
            elif token == "\r":
                column = 0
            elif token[0] == "\x1b":
                number = int(re.sub(r"\D", "", token) or 1)
                row = max(0, row - number) if token[-1] == "A" else row
                if token[-1] == "K":
                    lines[row] = [] if token == "\x1b[2K" else lines[row][:column]
            else:
                line = lines[row] + [" "] * (column - len(lines[row]))
                lines[row] = [*line[:column], token, *line[column + 1 :]]
                column += 1
        return ["".join(line).rstrip() for line in lines]


def show_on_terminal(monkeypatch):
    """Show stdout, stderr and Lightning's log on one terminal; not in a fixture, after which pytest replaces stdout."""
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    for name in NAMES:  # Lightning logs to the one that was imported last
        monkeypatch.setattr(logging.getLogger(name), "handlers", [logging.StreamHandler(screen)])
    return screen


class Wordy(Classifier):
    """Has more metrics beside a progress bar than one line holds."""

    def training_step(self, batch, batch_idx):
        self.log_dict({f"a_metric_with_a_long_name_{number}": 1.0 for number in range(4)}, prog_bar=True)
        return super().training_step(batch, batch_idx)


BARS = {"rich": lambda: RichProgressBar(refresh_rate=1, leave=True), "tqdm": lambda: TQDMProgressBar(leave=True)}


@pytest.mark.parametrize("bar", BARS)
def test_a_progress_bar_overwrites_no_table_and_no_decision(monkeypatch, caplog, bar):
    for name in NAMES:
        caplog.set_level(logging.INFO, name)
    terminal = show_on_terminal(monkeypatch)
    loader = DataLoader(dataset(64), batch_size=4)
    for strategy, devices, report in (
        (BalancedDataParallelStrategy(balance="auto"), 2, BalanceReport()),
        (DDPJoinStrategy(), 1, JoinReport()),
    ):
        callbacks = [report, BARS[bar]()]
        options = {"precision": "64-true", "max_epochs": 3, "callbacks": callbacks, "enable_progress_bar": True}
        quiet_trainer(strategy, devices, **options).fit(Wordy(), loader)
    lines = terminal.screen()
    assert sum("Epoch 2" in line for line in lines) >= 2, lines
    for title, rows in ("Replicas, medians of the last 48 batches", ["0", "1"]), ("Ranks", ["0", "1", "2"]):
        start = lines.index(title)
        table = lines[start + 1 : start + 5 + len(rows)]
        assert [line[0] for line in table] == ["┏", "┃", "┡", *("│" for _ in rows), "└"], table
        assert [row.replace("│", " ").split()[0] for row in table[3:-1]] == rows
    assert any(line.startswith('`balance="auto"`') for line in lines), lines

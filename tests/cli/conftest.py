import logging
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from lightning_ddp_ext.cli.main import main


def close_logs(folder):
    """Take the log files of a job from all loggers, where they would stay until the process ends."""
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    for logger in loggers:
        for handler in [*logger.handlers]:
            if isinstance(handler, logging.FileHandler) and folder in Path(handler.baseFilename).parents:
                logger.removeHandler(handler)
                handler.close()


@pytest.fixture
def call_main(tmp_path, monkeypatch, capsys):
    """Run the command in this process until it exits; returns its exit code and what it has printed."""

    def call(*arguments, **environ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["lightning-ddp-ext", *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        for name, value in {"HYDRA_FULL_ERROR": "0", **environ}.items():
            monkeypatch.setenv(name, value)
        GlobalHydra.instance().clear()
        with pytest.raises(SystemExit) as ended:
            main()
        close_logs(tmp_path)
        return ended.value.code, capsys.readouterr()

    return call


@pytest.fixture
def complaint(call_main):
    """Run the command in this process, which has to refuse it without a traceback; returns the last line."""

    def call(*arguments, **environ):
        code, printed = call_main(*arguments, **environ)
        assert (code, "Traceback" in printed.err) == (1, False), printed.err
        line = printed.err.splitlines()[-1]
        assert line.startswith("lightning-ddp-ext: ")
        return line

    return call

import sys

import pytest
from hydra.core.global_hydra import GlobalHydra

from lightning_ddp_ext.cli.main import main


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

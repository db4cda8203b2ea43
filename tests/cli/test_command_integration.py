"""The command in separate processes: runs, files, comparisons and interrupts."""

import csv
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from omegaconf import OmegaConf

from lightning_ddp_ext.demo.digits import DigitsCNN
from tests.cli.commands import COMMAND, OWN, command, run_folder

CONF = Path(__file__).parents[2] / "conf"


def test_the_default_run_learns_and_writes_every_file(tmp_path):
    done = command(tmp_path, "strategy.gpu0_batch_size=8", umask=0)
    for expected in (
        "replica 0 on cpu: 8 samples", "replica 1 on cpu: 24 samples", "global batch size", "steps per epoch",
        "test_accuracy", "SHA-256 of training",
    ):  # fmt: skip
        assert expected in done.stdout
    assert (done.stdout + done.stderr).count("GPU available") == 1  # by Lightning's handler, and not by Hydra's too
    run = run_folder(tmp_path)
    assert (run / "train.log").read_text().count("`Trainer.fit` stopped: `max_epochs=12` reached.") == 1
    result = done.stdout.partition("Result")[2]
    assert float(result.partition("test_accuracy")[2].split()[1]) >= 0.97
    assert OmegaConf.load(run / "config.yaml").strategy.gpu0_batch_size == 8
    with (run / "metrics.csv").open() as file:
        assert {"train_loss_step", "val_accuracy", "test_accuracy"} <= set(next(csv.reader(file)))
    with (run / "replicas.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [rows[0]["chunk"], rows[1]["chunk"]] == ["8", "24"]
    assert (run / "run.png").read_bytes().startswith(b"\x89PNG")
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    DigitsCNN().load_state_dict(state)
    assert not [path for path in tmp_path.rglob("*") if path.stat().st_mode & stat.S_IWOTH]


@pytest.mark.slow
def test_ranks_train_on_different_shares_of_the_data(tmp_path):
    done = command(
        tmp_path, "strategy=ddp_join", "trainer.devices=2", "data.train_fractions=[0.7,0.3]", "trainer.max_epochs=1",
        "trainer.precision=64-true", "trainer.limit_train_batches=16", "callbacks=join_report",
        OMP_NUM_THREADS="1", limit=240,
    )  # fmt: skip
    assert "16, 12" in done.stdout
    assert done.stdout.count("shadow steps") == 1
    run, listed = run_folder(tmp_path), done.stdout.partition("Result")[2]
    assert [path.name for path in sorted(run.glob("*.log"))] == ["train.log", "train_ddp_process_1.log"]
    assert "train.log" in listed
    assert "train_ddp_process_1.log" not in listed  # it is empty


@pytest.mark.slow
def test_streams_of_different_length_are_read_to_their_end(tmp_path):
    done = command(
        tmp_path, "strategy=ddp_join", "experiment=stdlib_stream", "trainer.devices=2", "data.files=3",
        "data.batch_size=32", "model.width=32", "model.depth=1", "trainer.limit_val_batches=1",
        "trainer.limit_test_batches=1",
        OMP_NUM_THREADS="1", limit=240,
    )  # fmt: skip
    assert "steps per epoch │ unknown" in " ".join(done.stdout.split())
    table = done.stdout.partition("Ranks")[2].partition("Result")[0]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    (first, second) = ({"batches": int(row[2]), "shadow_ranks": int(row[4])} for row in rows)
    assert first["batches"] + first["shadow_ranks"] == second["batches"] + second["shadow_ranks"]
    assert first["shadow_ranks"] + second["shadow_ranks"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], ["--multirun"]])
def test_classes_and_a_strategy_of_the_working_directory_are_found_and_start_processes(tmp_path, mode):
    (tmp_path / "mine.py").write_text(OWN)
    for group in ("experiment", "strategy"):
        (tmp_path / "conf" / group).mkdir(parents=True)
    (tmp_path / "conf" / "strategy" / "plain.yaml").write_text("_target_: lightning.pytorch.strategies.DDPStrategy\n")
    (tmp_path / "conf" / "experiment" / "own.yaml").write_text(
        "# @package _global_\ndefaults: [override /model: custom, override /data: custom, override /logger: none]\n"
        "model: {_target_: mine.Net, width: 3}\ndata: {_target_: mine.Data}\ntrainer: {max_epochs: 1}\n"
    )
    own = ["experiment=own", "strategy=plain", "trainer.devices=2", "callbacks=none"]
    done = command(tmp_path, *mode, *own, OMP_NUM_THREADS="1")
    assert "my_test" in done.stdout
    assert done.stdout.count("2 processes on cpu") == 1


@pytest.mark.slow
def test_an_interrupt_leaves_no_process_behind(tmp_path):
    process = subprocess.Popen(
        [sys.executable, *COMMAND, "trainer.max_epochs=1000", "callbacks=none"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    limit = threading.Timer(120, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "run folder" in line:
                break
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("runs/*/*/metrics.csv")) and time.monotonic() < deadline:  # it trains
            time.sleep(0.2)
        assert process.poll() is None, "".join(lines)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "graceful shutdown" in rest
        assert not [p for p in psutil.process_iter(["pid"]) if _session(p.pid) == process.pid]
    finally:
        limit.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


@pytest.mark.slow
def test_the_experiments_of_package_and_checkout_run(tmp_path):
    (tmp_path / "conf").symlink_to(CONF)
    done = command(tmp_path, "experiment=digits_three_replicas", "trainer.max_epochs=1", "test=false")
    assert "replica 2 on cpu: 12 samples" in done.stdout
    done = command(tmp_path, "experiment=byte_transformer", "trainer.max_steps=10", "trainer.limit_test_batches=3")
    assert "test_bits_per_byte" in done.stdout

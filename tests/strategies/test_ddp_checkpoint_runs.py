"""`ddp_checkpoint` started as a user would start it, and told to stop."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ddp_ext.testing import run_processes
from tests.strategies import ddp_ranks as ranks

HERE = Path(__file__).parent


@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
def test_a_script_starts_its_own_processes(start_method):
    command = [sys.executable, str(HERE / "ddp_scripts.py"), start_method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "SPREAD 0.0 STEPS 6" in done.stdout
    assert start_method != "popen" or "SPREAD 0.0 STEPS 9" in done.stdout
    assert "TESTED ['val_loss']" in done.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_ends_all_after_the_same_batch(rank):
    ends = run_processes(ranks.train_until_signal, 2, rank, timeout=120)
    assert [end["exception"] for end in ends] == ["SIGTERMException"] * 2
    assert ends[0]["batch"] == ends[1]["batch"] == 3
    assert ends[0]["digest"] == ends[1]["digest"]


def test_a_signal_inside_an_accumulation_window_is_agreed_at_its_end():
    ends = run_processes(ranks.train_until_signal, 2, 1, 4, timeout=120)
    assert [end["batch"] for end in ends] == [3, 3]
    assert [end["steps"] for end in ends] == [1, 1]


def test_nothing_is_sent_for_signals_in_a_step():
    """Lightning sends two messages in each batch."""
    ours, theirs = (run_processes(ranks.count_broadcasts, 2, name, timeout=120) for name in ("ddp_checkpoint", "ddp"))
    assert ours == [0, 0]
    assert min(theirs) >= 5


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_huggingface_model_with_gradient_checkpointing_and_two_losses(use_reentrant):
    for found in run_processes(ranks.fit_bert, 2, use_reentrant, timeout=120):
        assert found["error"] < 1e-12
        assert found["spread"] == 0.0
        assert found["recomputed"] > found["forwards"]


def test_torch_fails_on_the_same_model():
    """The negative control."""
    for found in run_processes(ranks.fit_bert, 2, True, theirs=True, timeout=120):
        assert found["message"]

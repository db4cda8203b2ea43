"""`ddp_checkpoint` started as a user would start it, told to stop, and with someone else's model."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.strategies import ddp_runs as ranks
from tests.support.processes import run_processes

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
def test_a_script_starts_its_own_processes(start_method):
    command = [sys.executable, str(HERE / "ddp_scripts.py"), start_method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "SPREAD 0.0 STEPS 6" in done.stdout
    assert start_method != "popen" or "SPREAD 0.0 STEPS 9" in done.stdout
    assert "TESTED ['val_loss']" in done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found; one launch for all tests below."""
    return run_processes(ranks.run_all, 2, str(tmp_path_factory.mktemp("runs")), timeout=200)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_ends_all_after_the_same_batch(found, rank):
    ends = [by_name[f"signal to rank {rank}"] for by_name in found]
    assert [end["exception"] for end in ends] == ["SIGTERMException"] * 2
    assert ends[0]["batch"] == ends[1]["batch"] == 3
    assert ends[0]["digest"] == ends[1]["digest"]


def test_a_signal_inside_an_accumulation_window_is_agreed_at_its_end(found):
    ends = [by_name["signal in a window"] for by_name in found]
    assert [end["batch"] for end in ends] == [3, 3]
    assert [end["steps"] for end in ends] == [1, 1]


def test_a_checkpoint_is_saved_when_a_rank_fails_and_the_run_is_put_away(tmp_path):
    ends = run_processes(ranks.fail_and_save, 2, str(tmp_path), timeout=120)
    assert [end["error"] for end in ends] == ["OtherRankError", "ArithmeticError"]
    assert ends[0]["steps"] == [2]
    assert all(end["is_restored"] for end in ends)


def test_nothing_is_sent_for_signals_in_a_step(found):
    """Lightning sends a message before each batch."""
    assert [by_name["broadcasts of ddp_checkpoint"] for by_name in found] == [0, 0]
    assert min(by_name["broadcasts of ddp"] for by_name in found) >= 5


@pytest.mark.parametrize("name", ["reentrant", "non-reentrant"])
def test_a_huggingface_model_with_gradient_checkpointing_and_two_losses(found, name):
    for by_name in found:
        assert by_name[name]["error"] < 1e-12
        assert by_name[name]["spread"] == 0.0
        assert by_name[name]["recomputed"] > by_name[name]["forwards"]


def test_torch_fails_on_the_same_model(found):
    """The negative control."""
    assert all(by_name["reentrant with ddp"]["message"] for by_name in found)

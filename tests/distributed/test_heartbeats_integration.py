"""Ranks that watch over each other in plain torch. One launch, in which all scenarios are played at the same time."""

import pytest

from lightning_ddp_ext.distributed.watchdog import STALL_EXIT_CODE
from tests.distributed.watch_programs import LIMIT, SCENARIOS, STEPS, play_scenarios
from tests.support.processes import run_processes

# With thirty processes on few cores; the ranks wait for a minute without a watch.
SOON = LIMIT + 35
AFTER_WORD_OF_IT = 25.0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    (played,) = run_processes(play_scenarios, 1, str(tmp_path_factory.mktemp("scenarios")), timeout=200)
    return played


def failed(row, *parts, within=SOON):
    assert not row["timed_out"], row["output"]
    assert row["seconds"] < within, row["output"]
    for part in parts:
        assert part in row["error"], row["error"] or row["output"]


@pytest.mark.parametrize("name", ["nothing", "rank 1 is slow", "each waits while bytes come"])
def test_ranks_that_only_take_their_time_are_left_alone(outcomes, name):
    for row in outcomes[name]:
        assert row["value"] == STEPS, row["output"]
        assert "stall report" not in row["output"]


@pytest.mark.parametrize(("name", "living"), [("rank 1 is stopped", 0), ("rank 1 is stopped, file", 0)])
def test_a_rank_without_a_sign_of_life_ends_the_others(outcomes, name, living):
    row = outcomes[name][living]
    failed(
        row,
        "OtherRankError: rank 1 stalled: no sign of life of rank 1 for",
        "step 3, counting",
        "in stop (watch_programs.py",
    )
    assert row["seconds"] > LIMIT


def test_a_stopped_rank_0_ends_the_others_though_its_store_does_not_answer(outcomes):
    failed(
        outcomes["rank 0 is stopped"][1], "OtherRankError: rank 0 has stalled: its store has not answered rank 1 for"
    )


@pytest.mark.parametrize(("name", "living"), [("rank 1 is stopped", 0), ("rank 0 is stopped", 1)])
def test_the_report_shows_every_rank_and_the_stack_of_its_own(outcomes, name, living):
    output = outcomes[name][living]["output"]
    assert output.count(f"stall report of rank {living} of 2") == 1
    rows = [line.split() for line in output.splitlines() if line[:1] in "01" and "counting" in line]
    assert [row[0] for row in rows] == ["0", "1"]
    assert [row[3] for row in rows] == ["3", "3"]
    assert "all_reduce <- run_rank (watch_programs.py" in output
    assert "Python stack of the main thread" in output
    assert "dist.all_reduce(torch.ones(1))" in output
    assert "Restart the run from its last checkpoint" in output


def test_ranks_that_wait_for_each_other_are_ended(outcomes):
    for row in outcomes["each waits for the other"]:
        failed(
            row, "OtherRankError: every rank waits for another one, and nothing has come for", "recv <- wait_for_anoth"
        )
        assert "stall report" in row["output"]


def test_without_a_limit_a_stopped_rank_is_found_when_a_collective_times_out(outcomes):
    row = outcomes["rank 1 is stopped, no limit"][0]
    failed(row, "OtherRankError: the process of rank 1 is gone: no sign of life of rank 1")
    assert "stall report" not in row["output"]


def test_a_rank_that_does_not_come_in_time_is_named_with_where_it_is(outcomes):
    failed(
        outcomes["rank 1 does not come"][0],
        "OtherRankError: rank 0 waited in vain",
        "rank 1: step 3, counting, in sleep_long",
    )
    failed(outcomes["rank 1 does not come"][1], "OtherRankError: rank 0 waited in vain")


@pytest.mark.parametrize(("name", "living"), [("rank 1 is killed", 0), ("rank 0 is killed", 1)])
def test_a_process_that_is_gone_is_named(outcomes, name, living):
    failed(outcomes[name][living], f"OtherRankError: the process of rank {1 - living} is gone", within=AFTER_WORD_OF_IT)
    assert outcomes[name][1 - living]["exit_code"] == -9


@pytest.mark.parametrize("name", ["rank 1 fails", "rank 0 fails", "rank 1 fails with a collective under way"])
def test_every_rank_tells_the_original_error_and_its_rank(outcomes, name):
    culprit = int(name[5])
    failed(outcomes[name][culprit], "ArithmeticError: boom", within=AFTER_WORD_OF_IT)
    told = f"OtherRankError: rank {culprit} failed: ArithmeticError: boom (at step 3, counting"
    failed(outcomes[name][1 - culprit], told, within=AFTER_WORD_OF_IT)


def test_a_rank_that_is_busy_in_python_is_interrupted(outcomes):
    row = outcomes["rank 1 fails while rank 0 is busy"][0]
    failed(row, "OtherRankError: rank 1 failed: ArithmeticError: boom", within=AFTER_WORD_OF_IT)


def test_a_process_that_cannot_be_interrupted_is_ended_after_its_last_words(outcomes):
    row = outcomes["rank 1 fails while rank 0 is deaf"][0]
    assert row["exit_code"] == STALL_EXIT_CODE
    assert row["seconds"] < AFTER_WORD_OF_IT
    assert "rank 1 failed: ArithmeticError: boom" in row["output"]
    assert "time.sleep(60)" in row["output"]
    assert "LAST WORDS" in row["output"]


def test_a_rank_that_has_ended_its_run_is_not_missed(outcomes):
    failed(outcomes["rank 1 leaves"][0], "OtherRankError: rank 1 ended the run while rank 0 still waited")
    assert outcomes["rank 1 leaves"][1]["value"] == 3


def test_every_scenario_was_played_and_looked_at(outcomes):
    assert outcomes.keys() == SCENARIOS.keys()

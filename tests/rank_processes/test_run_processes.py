"""`run_processes` returns what ranks return, or says in bounded time why not."""

import functools
import re
import signal
import threading
import time
from typing import Any

import psutil
import pytest

from tests.support.rank_processes import RankError, RankTimeoutError, run_processes

from . import rank_functions as ranks
from .helpers import raises_with

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("kind_of_ranks")]


@pytest.fixture(scope="module")
def healthy_run(kind_of_ranks: None) -> tuple[list[float], float]:
    """Results of a collective that completes, and its seconds: the measure for the limit of one that does not."""
    started = time.monotonic()
    results = run_processes(ranks.all_reduce_ranks, 2, timeout=100)
    return results, time.monotonic() - started


def test_results_come_in_rank_order_and_arguments_arrive() -> None:
    results = run_processes(ranks.collect_call, 3, "a", [1, 2], key={"b": None})
    assert results == [(rank, ("a", [1, 2]), {"key": {"b": None}}) for rank in range(3)]


def test_partial_binds_names_that_run_processes_takes_itself() -> None:
    assert run_processes(functools.partial(ranks.collect_call, timeout="mine"), 1) == [(0, (), {"timeout": "mine"})]


def test_gloo_all_reduce_works_without_further_setup(healthy_run: tuple[list[float], float]) -> None:
    assert healthy_run[0] == [3.0, 3.0]


def test_environment_names_the_rank_and_a_port_of_this_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("RANK", "9")
    first, second = run_processes(ranks.collect_environment, 2)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    assert [first[name] for name in names] == ["0", "0", "2", "2", "127.0.0.1", "1"]
    assert [second[name] for name in names] == ["1", "1", "2", "2", "127.0.0.1", "1"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert 0 < int(first["MASTER_PORT"]) < 65536


def test_env_adds_overrides_and_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNWANTED", "here")
    (environment,) = run_processes(
        ranks.collect_environment, 1, env={"EXTRA": "x", "OMP_NUM_THREADS": "3", "UNWANTED": None}
    )
    assert environment["EXTRA"] == "x"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "UNWANTED" not in environment


def test_ranks_import_neither_torch_nor_lightning_by_themselves() -> None:
    (modules,) = run_processes(ranks.collect_modules, 1)
    assert not {"torch", "lightning", "lightning_ddp_ext"} & set(modules)


def test_output_is_forwarded_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    run_processes(ranks.print_lines, 2, 2)
    assert capsys.readouterr().out.splitlines() == [
        f"[rank {rank}] line {line} of rank {rank}" for rank in range(2) for line in range(2)
    ]


# Refusals before anything starts


def test_local_functions_and_lambdas_are_refused() -> None:
    def local() -> None: ...

    for function in (local, lambda: None):
        with raises_with(TypeError, "`function` cannot be sent", "top level of a module"):
            run_processes(function, 1)


def test_unpicklable_arguments_are_named() -> None:
    with raises_with(TypeError, r"`args\[1\]` cannot be sent", "lock"):
        run_processes(ranks.collect_call, 1, 1, threading.Lock())
    with raises_with(TypeError, "`key` cannot be sent", "lock"):
        run_processes(ranks.collect_call, 1, key=threading.Lock())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "`world_size` must be at least 1, got 0"),
        ({"timeout": 0}, "`timeout` must be above 0 seconds, got 0"),
        ({"timeout": float("nan")}, "`timeout` must be above 0 seconds, got nan"),
        ({"grace": -1}, "`grace` must be at least 0 seconds, got -1"),
        ({"last_lines": -1}, "`last_lines` must be at least 0, got -1"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run_processes(ranks.rank, **{"world_size": 1, **arguments})


def test_environment_values_must_be_strings() -> None:
    with pytest.raises(TypeError, match=r"`env\['EXTRA'\]` must be a string or None, got 1. Use '1'."):
        run_processes(ranks.rank, 1, env={"EXTRA": 1})  # type: ignore[dict-item]


# Failures


def test_exception_ends_ranks_that_wait_in_a_collective() -> None:
    with raises_with(
        RankError,
        "^rank 1 of 2 raised LookupError: no such batch. Its traceback is below.",
        "--- rank 0 (raised|not finished)",
        "in raise_while_rank_0_waits",
        "--- rank 1 raised LookupError",
        "Traceback",
        r'raise LookupError\("no such batch"\)',
        "last lines of output:\n  about to fail",
    ):
        run_processes(ranks.raise_while_rank_0_waits, 2, timeout=100, grace=1)


def test_exception_ends_all_even_if_its_process_stays() -> None:
    started = time.monotonic()
    with raises_with(
        RankError,
        "^rank 1 of 2 raised LookupError",
        "--- rank 0 not finished",
        "in raise_but_stay",
        "--- rank 1 raised",
        "in sleep_forever",
    ):
        run_processes(ranks.raise_but_stay, 2, timeout=100, grace=3)
    assert 3 <= time.monotonic() - started < 30


def test_first_failure_in_time_is_the_headline() -> None:
    with raises_with(RankError, "^rank 2 of 3 raised KeyError: 'key of rank 2'", "After it failed: ranks 0, 1"):
        run_processes(ranks.raise_in_order, 3, {2: 0.0, 0: 1.0, 1: 2.0})


def test_exit_code_is_reported() -> None:
    with raises_with(RankError, "^rank 1 of 2 exited with code 3 before its function returned", "rank 0 finished"):
        run_processes(ranks.exit_with, 2, 3)


def test_leaving_the_process_with_code_0_is_a_failure() -> None:
    with raises_with(RankError, "^rank 0 of 1 exited with code 0 before its function returned"):
        run_processes(ranks.leave_before_returning, 1)


@pytest.mark.parametrize(("number", "remedy"), [(signal.SIGKILL, "ran out of memory"), (signal.SIGSEGV, "last lines")])
def test_signal_is_reported_and_others_are_ended(
    number: signal.Signals, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # last words must arrive without it
    with raises_with(
        RankError,
        f"^rank 1 of 2 was killed by {number.name} before its function returned",
        remedy,
        "--- rank 0 not finished",
        "in sleep_forever",
        "--- rank 1 was killed",
        "last words",
    ):
        run_processes(ranks.kill_rank_1, 2, int(number), timeout=100, grace=3)


def test_only_the_last_lines_are_quoted() -> None:
    with pytest.raises(RankError) as caught:
        run_processes(ranks.print_lines_and_fail, 1, 50, last_lines=3)
    assert re.findall(r"line (\d+) of", str(caught.value)) == ["47", "48", "49"]


def test_unpicklable_result_says_so() -> None:
    with raises_with(RankError, "^rank 0 of 1 returned a function that cannot be pickled", "plain data"):
        run_processes(ranks.return_lambda, 1)


def test_result_that_cannot_be_unpickled_says_so() -> None:
    with raises_with(RankError, r"^rank 0 returned a value that cannot be unpickled here \(ValueError: refused\)"):
        run_processes(ranks.return_unloadable, 1)


# The hard limit


def test_hang_in_python_shows_stack_and_last_lines() -> None:
    started = time.monotonic()
    with raises_with(
        RankTimeoutError,
        "^ranks 0, 1 of 2 did not finish within `timeout`=4 seconds",
        "--- rank 0",
        "in sleep_forever",
        "in print_and_hang",
        "waiting on rank 0",
        "--- rank 1",
        "in sleep_forever",
        "waiting on rank 1",
    ):
        run_processes(ranks.print_and_hang, 2, timeout=4)
    assert 4 <= time.monotonic() - started < 20


def test_hang_in_a_collective_shows_the_stack(healthy_run: tuple[list[float], float]) -> None:
    with raises_with(
        RankTimeoutError,
        "--- rank 0",
        "in all_reduce",
        "in hang_in_all_reduce",
        "entering",
        "--- rank 1",
        "sleep_forever",
    ):
        run_processes(ranks.hang_in_all_reduce, 2, timeout=1 + 1.5 * healthy_run[1])


def test_hang_in_c_with_the_interpreter_lock_shows_the_stack() -> None:
    with raises_with(RankTimeoutError, "--- rank 0 not finished: it was still running", "in sleep_in_c"):
        run_processes(ranks.sleep_in_c, 1, timeout=4)


def test_rank_that_returned_but_does_not_end_is_named() -> None:
    with raises_with(RankTimeoutError, "^rank 0 of 1 did not finish", "its function returned, but", "in sleep_forever"):
        run_processes(ranks.return_but_stay, 1, timeout=4)


def test_stopped_rank_is_reported_and_killed() -> None:
    before = set(psutil.Process().children())
    with raises_with(
        RankTimeoutError, "^rank 0 of 2 did not finish", "none: the process was stopped", "--- rank 1 finished"
    ):
        run_processes(ranks.stop_rank_0, 2, timeout=4)
    assert set(psutil.Process().children()) <= before

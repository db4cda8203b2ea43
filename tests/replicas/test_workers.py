import contextlib
import contextvars
import gc
import itertools
import os
import random
import signal
import threading
import time
import weakref
from functools import partial

import numpy
import psutil
import pytest
import torch

from lightning_ddp_ext._compat.torch import recompile_limit, recompile_limit_of
from lightning_ddp_ext.replicas.workers import ReplicaWorkers, SharedState

CPU = torch.device("cpu")


@pytest.fixture
def workers():
    workers = ReplicaWorkers([CPU, CPU])
    yield workers
    workers.close()


STEPS = itertools.count()


def run(workers, jobs, step=None):
    """Run jobs of a step, by default of another one than before, which has not been short."""
    return workers.run(step or f"step {next(STEPS)}", jobs, lambda index: f"note {index}")


def test_jobs_run_at_the_same_time_each_on_its_own_thread(workers):
    together = threading.Barrier(2, timeout=10)
    jobs = dict.fromkeys((0, 1), lambda: (together.wait(), threading.current_thread().name)[1])
    first, seconds = run(workers, jobs)
    again, _ = run(workers, jobs)
    assert first == again
    assert first[0] != first[1]
    assert set(seconds) == {0, 1}


@pytest.mark.parametrize("moment", ["start", "stop"])
def test_a_device_that_fails_with_the_job_does_not_keep_the_caller_waiting(workers, monkeypatch, moment):
    def fail(*_):
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(f"lightning_ddp_ext.replicas.workers.Timer.{moment}", fail)
    with pytest.raises(RuntimeError, match="device-side assert"):
        run(workers, {0: lambda: 1, 1: lambda: 2})


def test_a_single_job_runs_on_the_caller(workers):
    results, _ = run(workers, {1: threading.current_thread})
    assert results[1] is threading.current_thread()


def wait():
    time.sleep(0.01)


def work():
    end = time.thread_time() + 0.003
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("long", [wait, work])
def test_a_step_that_was_short_runs_on_the_caller_with_the_threads_of_workers_until_it_is_long(workers, long):
    def job(do=lambda: None):
        do()
        return threading.current_thread(), torch.get_num_threads()

    short, intra_op = {0: job, 1: job}, torch.get_num_threads()
    by_workers, _ = run(workers, short, "training_step")
    every = (run(workers, short, "training_step")[0] for _ in range(100))  # the system may stop a thread for a while
    here = next(found for found in every if found != by_workers)
    elsewhere, _ = run(workers, short, "backward")
    assert here == dict.fromkeys(short, (threading.current_thread(), by_workers[0][1]))
    assert elsewhere == by_workers
    assert by_workers[0][0] != by_workers[1][0]
    assert torch.get_num_threads() == intra_op
    run(workers, {0: job, 1: partial(job, long)}, "training_step")
    assert run(workers, short, "training_step")[0] == by_workers


def test_modes_and_context_variables_of_the_caller_hold_in_the_workers(workers):
    variable = contextvars.ContextVar("variable", default="default")

    def modes():
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            variable.get(),
            recompile_limit(),
            torch.zeros(1).device.type,
        )

    jobs, limit = {0: modes, 1: modes}, recompile_limit()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16), recompile_limit_of(17):
        token = variable.set("set")
        assert run(workers, jobs)[0] == dict.fromkeys(jobs, (False, False, torch.float16, "set", 17, "cpu"))
        variable.reset(token)
    with torch.inference_mode():
        assert run(workers, jobs)[0] == dict.fromkeys(jobs, (False, True, False, "default", limit, "cpu"))
    with torch.device("meta"):
        assert run(workers, jobs)[0] == dict.fromkeys(jobs, (True, False, False, "default", limit, "meta"))
    assert run(workers, jobs)[0] == dict.fromkeys(jobs, (True, False, False, "default", limit, "cpu"))


def test_intra_op_threads_are_shared_out_and_the_callers_number_stays():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        workers = ReplicaWorkers([CPU, CPU])
        torch.set_num_threads(3)  # a call in another part of the program must not reach the workers
        torch.set_num_threads(4)
        results, _ = run(workers, {0: torch.get_num_threads, 1: torch.get_num_threads})
        workers.close()
        assert results == {0: 2, 1: 2}
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def native_threads():
    return {thread.id for thread in psutil.Process().threads()}


def test_each_worker_has_two_openmp_threads_so_that_idle_ones_do_not_spin():
    before, intra_op = native_threads(), torch.get_num_threads()
    torch.set_num_threads(2)
    workers = ReplicaWorkers([CPU, CPU])
    torch.set_num_threads(intra_op)
    try:
        assert run(workers, {0: torch.get_num_threads, 1: torch.get_num_threads})[0] == {0: 1, 1: 1}
        assert len(native_threads() - before) >= 4
    finally:
        workers.close()


def test_an_exception_keeps_its_type_and_traceback_after_all_jobs_have_ended(workers):
    ended = []

    def fail():
        raise KeyError("lost")

    def slow():
        time.sleep(0.3)
        ended.append(True)

    with pytest.raises(KeyError, match="lost") as caught:
        run(workers, {0: fail, 1: slow})
    assert ended
    assert caught.value.__notes__ == ["note 0"]
    assert any(entry.name == "fail" for entry in caught.traceback)
    assert run(workers, {0: lambda: 1, 1: lambda: 2})[0] == {0: 1, 1: 2}


def test_the_tensors_of_a_failed_step_are_freed_with_its_error(workers):
    def fail():
        held = torch.ones(1)
        tensors.append(weakref.ref(held))
        raise ValueError

    tensors = []
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            run(workers, {0: fail, 1: fail})
        assert [tensor() for tensor in tensors] == [None, None]
    finally:
        gc.enable()


def leave(*_):
    raise SystemExit


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_waits_for_running_jobs(workers, error):
    ended = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler if error is KeyboardInterrupt else leave)

    def slow():
        time.sleep(0.6)
        ended.append(True)

    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(error):
            run(workers, {0: slow, 1: slow})
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(ended) == 2


def test_steps_on_one_generator_run_in_order_until_known_to_draw_nothing_and_always_after_a_draw():
    shared = SharedState([CPU, CPU])

    def run_step(step, draw=lambda: None):
        shared.watch(step)
        draw()
        return shared.notice_use(step)

    for _ in range(2):
        assert shared.forces_order("training_step")
        assert not run_step("training_step")
        assert not shared.forces_order("training_step")
        assert shared.forces_order("validation_step")
        shared.forget()
    with pytest.warns(UserWarning, match="`training_step` draws random numbers from the generator of cpu, which"):
        assert run_step("training_step", lambda: torch.rand(1))
    assert not run_step("training_step", lambda: torch.rand(1))  # a second warning would be an error
    assert shared.forces_order("training_step")
    alone = SharedState([CPU])
    assert not alone.forces_order("training_step")


@pytest.mark.parametrize(("draw", "name"), [(random.random, "Python"), (numpy.random.rand, "numpy")])
def test_a_first_step_that_draws_from_another_librarys_generator_runs_in_order_from_then_on(draw, name):
    shared = SharedState([CPU, CPU])
    shared.watch("training_step")
    draw()
    with pytest.warns(UserWarning, match=f"draws random numbers from the generator of {name}, which"):
        assert shared.notice_use("training_step")
    assert shared.forces_order("training_step")

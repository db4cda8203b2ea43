"""One persistent thread per replica, and the state of the process for which replicas run one after another."""

import contextlib
import contextvars
import queue
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_ext._compat.torch import parametrization_cache, version_of
from lightning_ddp_ext._devices import Timer, current_device, get_rng_state, set_rng_state
from lightning_ddp_ext.errors import UnsupportedFeatureError

Job = Callable[[], Any]
_Outcomes = dict[int, tuple[Any, BaseException | None]]  # result or exception of each replica that has ended

# Seconds of the calling thread, and of the clock, below which a job ends sooner than a thread wakes up for it.
_SHORT, _SHORT_WALL_TIME = 2e-4, 4e-4

_running = threading.local()


def current_replica() -> int | None:
    """Return the index of the replica whose step the calling thread runs, or None outside of a step.

    Examples:
        >>> current_replica() is None
        True
    """
    return getattr(_running, "replica", None)


class ReplicaWorkers:
    """Runs one job per replica, each always on the same thread.

    Persistent threads keep their OpenMP team and allocator arena; on the CPU they share the caller's intra-op threads.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._device_types = {"cpu", *(device.type for device in devices)}
        self._tasks: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in devices]
        self._threads: list[threading.Thread] = []  # started when they are needed
        self._threads_of_each = max(1, torch.get_num_threads() // len(self._devices))
        self._short: set[str] = set()  # the steps that were short on all replicas the last time

    def _start(self) -> None:
        intra_op, started = torch.get_num_threads(), threading.Barrier(len(self._devices) + 1)
        # Daemons, so that a thread stuck in a job does not keep the process alive.
        for index, (tasks, device) in enumerate(zip(self._tasks, self._devices, strict=True)):
            serve, name = partial(_serve, tasks, self._threads_of_each, started), f"replica-{index}-{device}"
            self._threads.append(threading.Thread(target=serve, name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        started.wait()
        # A worker's `set_num_threads` also becomes the default of threads that start later: put that back.
        torch.set_num_threads(intra_op)

    def run(
        self, step: str, jobs: Mapping[int, Job], describe: Callable[[int], str], in_order: bool = False
    ) -> tuple[dict[int, Any], dict[int, Timer]]:
        """Run jobs of a step at the same time and return their results and timers, by index of the replica.

        A single job, jobs in order, and jobs of a step that was short the last time, run on the calling thread. After
        all have ended, the exception of the first failed replica is raised with a note.
        """
        timers = {index: Timer(self._devices[index]) for index in jobs}
        if len(jobs) == 1:
            return self._run_in_order(jobs, describe, timers), timers
        taken: list[tuple[float, float]] = []
        jobs = {index: partial(_measured, job, taken) for index, job in jobs.items()}
        intra_op = torch.get_num_threads()
        if step in self._short and not in_order:
            torch.set_num_threads(self._threads_of_each)  # the results must not depend on the thread
        try:
            is_here = in_order or step in self._short
            results = (self._run_in_order if is_here else self._run_in_threads)(jobs, describe, timers)
        finally:
            torch.set_num_threads(intra_op)
        is_short = all(own < _SHORT and clock < _SHORT_WALL_TIME for own, clock in taken)
        (self._short.add if is_short else self._short.discard)(step)
        return results, timers

    def _run_in_order(
        self, jobs: Mapping[int, Job], describe: Callable[[int], str], timers: Mapping[int, Timer]
    ) -> dict[int, Any]:
        results: dict[int, Any] = {}
        for index, job in jobs.items():
            with _noted(describe, index):
                results[index] = _execute(index, job, timers[index], contextlib.nullcontext())
        return results

    def _run_in_threads(
        self, jobs: Mapping[int, Job], describe: Callable[[int], str], timers: Mapping[int, Timer]
    ) -> dict[int, Any]:
        if not self._threads:
            self._start()
        results: dict[int, Any] = {}
        modes = _modes_of_caller(self._device_types)
        tasks: list[tuple[int, Job]] = []
        outcomes: _Outcomes = {}
        end: queue.SimpleQueue[None] = queue.SimpleQueue()
        for index, job in jobs.items():
            # The caller's context variables hold, among others, the settings of torch's compiler.
            run = partial(contextvars.copy_context().run, _execute, index, job, timers[index], modes())
            tasks.append((index, partial(_attempt, index, run, outcomes, len(jobs), end)))
        started = 0
        try:
            for index, task in tasks:
                self._tasks[index].put(task)
                started += 1
            end.get()
        except BaseException:  # such as an interrupt or the exit of a signal handler
            # Replicas must not run into the teardown. A second interrupt gives up on a job that never ends.
            while len(outcomes) < started:
                time.sleep(0.01)
            raise
        for index, (result, error) in sorted(outcomes.items(), key=lambda outcome: outcome[0]):
            if error is not None:
                outcomes.clear()  # in a cycle with this frame, it would keep the tensors of the step
                try:
                    with _noted(describe, index):
                        raise error
                finally:
                    del error
            results[index] = result
        return results

    def close(self) -> None:
        """End the threads; leave behind a thread that is stuck in a job."""
        for tasks in self._tasks if self._threads else ():
            tasks.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._threads.clear()


def _serve(tasks: "queue.SimpleQueue[Job | None]", intra_op_threads: int, started: threading.Barrier) -> None:
    # After each parallel operation of the process, libgomp's idle threads spin for milliseconds, on cores that replicas
    # need; but not if the process has more of them than cores. So each worker starts a second one, which then sleeps.
    torch.set_num_threads(max(2, intra_op_threads))
    torch.zeros(2**17).add_(1)
    torch.set_num_threads(intra_op_threads)
    # Reading the number pins it: otherwise the first parallel operation takes whatever was set last in the process.
    torch.get_num_threads()
    started.wait()
    while (task := tasks.get()) is not None:
        task()
        del task  # otherwise the last job's tensors live until the next one


def _attempt(index: int, job: Job, outcomes: _Outcomes, jobs: int, end: "queue.SimpleQueue[None]") -> None:
    try:
        outcomes[index] = job(), None
    except BaseException as error:
        outcomes[index] = None, error
    if len(outcomes) == jobs:  # the caller sleeps until the last one, as each waking takes time of Python's global lock
        end.put(None)


def _measured(job: Job, taken: list[tuple[float, float]]) -> Any:
    """Run a job and note the seconds of its thread and of the clock."""
    own, clock = time.thread_time(), time.perf_counter()
    result = job()
    taken.append((time.thread_time() - own, time.perf_counter() - clock))
    return result


def _execute(index: int, job: Job, timer: Timer, context: AbstractContextManager[Any]) -> Any:
    _running.replica = index
    try:
        with current_device(timer.device), context:
            timer.start()
            result = job()
            timer.stop()
        return result
    finally:
        _running.replica = None


def _modes_of_caller(device_types: set[str]) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context that gives another thread the gradient, inference and autocast modes and device of this one."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = {kind: torch.get_autocast_dtype(kind) for kind in device_types if torch.is_autocast_enabled(kind)}
    cache, default = torch.is_autocast_cache_enabled(), torch.get_default_device()
    if grad and not inference and not autocast and default.type == "cpu":
        return contextlib.nullcontext

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(default)
            for kind, dtype in autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            yield

    return modes


@contextlib.contextmanager
def _noted(describe: Callable[[int], str], index: int) -> Iterator[None]:
    """Add a note that names the replica to an exception."""
    try:
        yield
    except BaseException as error:
        if sys.version_info >= (3, 11):
            error.add_note(describe(index))
        else:  # the attribute that Python 3.11 gave a method; pytest and rich print it on 3.10 as well
            vars(error)["__notes__"] = [*getattr(error, "__notes__", []), describe(index)]
        raise


class SharedState:
    """Decides whether replicas run one after another because a step uses state that several of them share.

    Side by side they would draw from a shared generator in an order that changes from run to run, and activation
    checkpointing, which rewinds it, would recompute with other masks. `parametrize.cached()` identifies a tensor by the
    master's module, so replicas would use each other's tensors. Each step runs in order at first, and after any use;
    the generators of Python and numpy are watched at first only.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        repeated = [device for device, count in Counter(devices).items() if count > 1 and device.type != "cpu"]
        self._devices = [torch.device("cpu"), *repeated] if len(devices) > 1 else []
        self._is_used = False
        self._watched: set[str] = set()
        self.watch("")

    def forces_order(self, step: str) -> bool:
        """Return True if replicas must run this step one after another."""
        return bool(self._devices) and (self._is_used or step not in self._watched)

    def watch(self, step: str) -> None:
        """Remember the shared state before a step, until its first use."""
        self._states = {} if self._is_used else {device: get_rng_state(device) for device in self._devices}
        self._other_states = _other_states() if self._states and step not in self._watched else {}
        self._cache = parametrization_cache()

    def notice_use(self, step: str) -> bool:
        """Return True, and warn, if a step is the first to use shared state; call after `watch` and the step."""
        self._watched.add(step)
        if self._is_used or not self._devices:
            return False
        drawn = [str(device) for device, state in self._states.items() if not torch.equal(state, get_rng_state(device))]
        if self._other_states:
            drawn += [name for name, state in _other_states().items() if state != self._other_states[name]]
        if drawn:
            use = f"draws random numbers from the generator of {drawn[0]}, which several replicas share"
        elif parametrization_cache() is not self._cache:  # leaving `cached()` puts an empty one in its place
            use = "uses `torch.nn.utils.parametrize.cached()`, whose cache all replicas share"
        else:
            return False
        self._is_used = True
        warnings.warn(
            f"`{step}` {use}. They run one after another from now on, so that seeds, activation checkpointing and"
            " cached tensors keep their meaning.",
            stacklevel=2,
        )
        return True

    def restore(self) -> None:
        """Restore the states of the generators from before the step."""
        for device, state in self._states.items():
            set_rng_state(state, device)

    def forget(self) -> None:
        """Watch every step again, because the module has changed."""
        self._watched.clear()


def _other_states() -> dict[str, Any]:
    state: Any = numpy.random.get_state()
    return {"Python": random.getstate(), "numpy": (bytes(state[1]), state[2])}


@contextmanager
def refuse_changed_settings(optimizers: Sequence[Optimizer], step: str) -> Iterator[None]:
    """Refuse a step that changes settings of optimizers, such as learning rates; changes inside a list go unnoticed."""
    before = [_settings(optimizer) for optimizer in optimizers]
    yield
    for optimizer, old in zip(optimizers, before, strict=True):
        new = _settings(optimizer)
        if new == old:
            continue
        for index, key in {**old, **new}:
            if old.get((index, key)) != new.get((index, key)):
                raise UnsupportedFeatureError(
                    f"`param_groups[{index}]['{key}']` of the optimizer {type(optimizer).__name__} was changed"
                    f" inside `{step}`, which every replica does again. Change it in `on_train_batch_start` or"
                    " `on_train_batch_end`, or return a scheduler from `configure_optimizers`."
                )


def _settings(optimizer: Optimizer) -> dict[tuple[int, str], Any]:
    """Return each setting by group and key: numbers, texts and tuples as they are, other objects by identity."""
    return {
        (index, key): _comparable(len(value) if key == "params" else value)
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
    }


def _comparable(value: Any) -> Any:
    if isinstance(value, (int, float, str, tuple)):  # faster than a union
        return value
    return id(value), version_of(value) if isinstance(value, Tensor) else None

"""One persistent thread per replica."""

import contextlib
import contextvars
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Job = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class ThreadState:
    """The thread-local state of torch that a fresh thread lacks: gradient, inference and autocast modes."""

    grad: bool
    inference: bool
    autocast: dict[str, torch.dtype]
    autocast_cache: bool

    @classmethod
    def capture(cls, device_types: set[str]) -> "ThreadState":
        """Read the state of the calling thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast={t: torch.get_autocast_dtype(t) for t in sorted(device_types) if torch.is_autocast_enabled(t)},
            autocast_cache=torch.is_autocast_cache_enabled(),
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Give the calling thread this state."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device_type, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=self.autocast_cache))
            yield


class Timer:
    """Measures how long a device works on a job.

    Args:
        device: The device. On CUDA events are recorded in its current stream, because kernels run behind the calls
            that start them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Start measuring."""
        self._start = self._now()

    def stop(self) -> None:
        """Stop measuring."""
        self._stop = self._now()

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @property
    def seconds(self) -> float:
        """The time between start and stop. Waits for the device, so it is best read when other work has followed."""
        if isinstance(self._start, float):
            return float(self._stop - self._start)
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / 1000


@dataclass(slots=True)
class _Outcome:
    timer: Timer
    result: Any = None
    error: BaseException | None = None
    finished: bool = False


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

    Persistent threads keep their OpenMP team, current CUDA device and allocator arena. On the CPU the intra-op threads
    of the caller are shared out between them.

    Args:
        devices: The device of each replica.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._device_types = {"cpu", *(device.type for device in devices)}
        self._jobs: list[queue.SimpleQueue[Callable[[], None] | None]] = [queue.SimpleQueue() for _ in devices]
        intra_op = torch.get_num_threads()
        share = max(1, intra_op // len(self._devices))
        started = threading.Barrier(len(self._devices) + 1)
        self._threads = [
            threading.Thread(
                target=_serve, args=(jobs, device, share, started), name=f"replica-{index}-{device}", daemon=True
            )
            for index, (jobs, device) in enumerate(zip(self._jobs, self._devices, strict=True))
        ]
        for thread in self._threads:
            thread.start()
        started.wait()
        # A worker's `set_num_threads` also becomes the default of threads that start later: put that back.
        torch.set_num_threads(intra_op)

    def run(
        self, jobs: Mapping[int, Job], describe: Callable[[int], str], in_order: bool = False
    ) -> tuple[dict[int, Any], dict[int, Timer]]:
        """Run jobs at the same time and wait for all of them.

        A single job, and jobs in order, run on the calling thread, which has all intra-op threads to itself.

        Args:
            jobs: A callable for each index of a replica.
            describe: What a replica was working on, for the note on an exception.
            in_order: Whether to run one after another.

        Returns:
            The results, and what has measured each job, by index.

        Raises:
            BaseException: The first failed replica's own exception, after every job has ended, with a note that names
                the replica. `KeyboardInterrupt` too waits for the running jobs.
        """
        state = ThreadState.capture(self._device_types)
        outcomes = {index: _Outcome(Timer(self._devices[index])) for index in jobs}
        if in_order or len(jobs) == 1:
            for index, job in jobs.items():
                _execute(index, job, outcomes[index], _current_device(self._devices[index]))
                if outcomes[index].error is not None:
                    break
        else:
            self._run_on_threads(jobs, outcomes, state)
        for index, outcome in sorted(outcomes.items()):
            if outcome.error is not None:
                raise _with_note(outcome.error, describe(index))
        return (
            {index: outcome.result for index, outcome in outcomes.items()},
            {index: outcome.timer for index, outcome in outcomes.items()},
        )

    def _run_on_threads(self, jobs: Mapping[int, Job], outcomes: dict[int, _Outcome], state: ThreadState) -> None:
        progress: queue.SimpleQueue[None] = queue.SimpleQueue()

        def task(index: int, job: Job, outcome: _Outcome) -> Callable[[], None]:
            # The caller's context variables, which hold the settings of torch's compiler among others.
            context = contextvars.copy_context()

            def run() -> None:
                try:
                    context.run(_execute, index, job, outcome, state.applied())
                finally:
                    outcome.finished = True
                    progress.put(None)

            return run

        waiting = {index: task(index, job, outcomes[index]) for index, job in jobs.items()}
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                while waiting:
                    index = next(iter(waiting))
                    self._jobs[index].put(waiting[index])
                    del waiting[index]
                # The flags decide, not the queue: an interrupt may come between taking an entry and counting it.
                while not all(outcome.finished for outcome in outcomes.values()):
                    progress.get()
                break
            except KeyboardInterrupt as error:
                # Replicas must not run into the teardown. A second interrupt gives up on a job that never ends.
                if interrupt is not None:
                    raise
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """End the threads. A thread stuck in a job is left behind; as a daemon it does not keep the process alive."""
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._threads.clear()


def _serve(
    jobs: "queue.SimpleQueue[Callable[[], None] | None]",
    device: torch.device,
    intra_op_threads: int,
    started: threading.Barrier,
) -> None:
    if device.type == "cuda":
        try:
            torch.cuda.set_device(device)
        except BaseException:
            started.abort()  # otherwise the constructor would wait for ever
            raise
    torch.set_num_threads(intra_op_threads)
    # Reading the number pins it: otherwise the first parallel operation takes whatever was set last in the process.
    torch.get_num_threads()
    started.wait()
    while (job := jobs.get()) is not None:
        job()
        del job  # otherwise the last job's tensors live until the next one


def _execute(index: int, job: Job, outcome: _Outcome, context: contextlib.AbstractContextManager[Any]) -> None:
    _running.replica = index
    try:
        outcome.timer.start()
        with context:
            outcome.result = job()
    except BaseException as error:
        outcome.error = error
    try:
        outcome.timer.stop()
    except BaseException as error:  # a device that has failed fails here again
        outcome.error = outcome.error or error
    _running.replica = None


def _current_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _with_note(error: BaseException, note: str) -> BaseException:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:  # the attribute that Python 3.11 gave a method; pytest and rich print it on 3.10 as well
        vars(error)["__notes__"] = [*getattr(error, "__notes__", []), note]
    return error

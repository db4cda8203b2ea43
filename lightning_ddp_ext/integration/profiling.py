"""Lightning's profilers inside a step that several replicas run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, SimpleProfiler

from lightning_ddp_ext.parallel.workers import Job

_running: ContextVar[int | None] = ContextVar("running replica", default=None)


def watches_one_thread(trainer: Trainer) -> bool:
    """Tell whether replicas must run one after another, on the calling thread, for the Trainer's profiler to see them.

    The profilers of Python and of torch record the thread that started them, and hooks of Lightning's around them keep
    one record per name of a module.
    """
    return not isinstance(_profiler(trainer), PassThroughProfiler | SimpleProfiler)


@contextmanager
def actions_named_by_replica(trainer: Trainer, jobs: Mapping[int, Job]) -> Iterator[Mapping[int, Job]]:
    """Give what replicas profile a name for each replica, such as `[Replica 1]attention`.

    A profiler knows an action by its name alone, and refuses to start one that another replica has started.

    Args:
        trainer: Its profiler is meant.
        jobs: What each replica is about to run.

    Yields:
        The jobs to run instead.
    """
    profiler = _profiler(trainer)
    if isinstance(profiler, PassThroughProfiler):
        yield jobs
        return
    before = dict(vars(profiler))
    # On the instance: code inside a step reaches the profiler by many ways.
    vars(profiler).update(start=_named(profiler.start), stop=_named(profiler.stop))
    try:
        yield {index: partial(_run_as, index, job) for index, job in jobs.items()}
    finally:
        for method in ("start", "stop"):
            vars(profiler).pop(method)
            if method in before:
                vars(profiler)[method] = before[method]


def _profiler(trainer: Trainer) -> Profiler:
    return trainer.profiler  # type: ignore[attr-defined, no-any-return]  # public, but set outside of the class


def _named(method: Callable[[str], None]) -> Callable[[str], None]:
    def call(action_name: str) -> None:
        index = _running.get()
        method(action_name if index is None else f"[Replica {index}]{action_name}")

    return call


def _run_as(index: int, job: Job) -> Any:
    token = _running.set(index)
    try:
        return job()
    finally:
        _running.reset(token)

"""Lightning's profilers inside a step that several replicas run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, SimpleProfiler

from lightning_ddp_ext.parallel.replicas.workers import current_replica


def watches_one_thread(trainer: Trainer) -> bool:
    """Tell whether replicas must run one after another, on the calling thread, for the Trainer's profiler to see them.

    The profilers of Python and of torch record the thread that started them, and hooks of Lightning's around them keep
    one record per name of a module.
    """
    return not isinstance(_profiler(trainer), PassThroughProfiler | SimpleProfiler)


@contextmanager
def actions_named_by_replica(trainer: Trainer) -> Iterator[None]:
    """Give what replicas profile a name for each replica, such as `[Replica 1]attention`.

    A profiler knows an action by its name alone, and refuses to start one that another replica has started.

    Args:
        trainer: The Trainer whose profiler is meant.
    """
    profiler = _profiler(trainer)
    if isinstance(profiler, PassThroughProfiler):
        yield
        return
    before = dict(vars(profiler))
    # On the instance: code inside a step reaches the profiler by many ways.
    vars(profiler).update(start=_named(profiler.start), stop=_named(profiler.stop))
    try:
        yield
    finally:
        for method in ("start", "stop"):
            vars(profiler).pop(method)
            if method in before:
                vars(profiler)[method] = before[method]


def _profiler(trainer: Trainer) -> Profiler:
    return trainer.profiler  # type: ignore[attr-defined, no-any-return]  # public, but set outside of the class


def _named(method: Callable[[str], None]) -> Callable[[str], None]:
    def call(action_name: str) -> None:
        index = current_replica()
        method(action_name if index is None else f"[Replica {index}]{action_name}")

    return call

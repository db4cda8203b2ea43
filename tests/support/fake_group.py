"""Ranks as threads of one process, for unit tests of code that exchanges tensors with other ranks."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

T = TypeVar("T")


def run_threads(
    function: Callable[..., T], world_size: int, *args: Any, timeout: float = 20.0, **kwargs: Any
) -> list[T]:
    """Call `function(*args, **kwargs)` on `world_size` threads and return the results in the order of ranks.

    Each thread is a rank of its own default process group (gloo): `dist.get_rank()`, collectives, asynchronous works,
    `send`, `recv` and `dist.new_group` behave as they do in processes. The environment, the global RNG and everything
    else in the interpreter is shared, so a Trainer needs `tests.support.processes.run_processes`.

    If a rank raises, the first error is raised here and the collectives of the other ranks fail. A collective that
    another rank never enters fails after `timeout` seconds.
    """
    store = dist.HashStore()
    all_done = threading.Barrier(world_size)
    failures: list[BaseException] = []

    def run_rank(rank: int) -> T:
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        try:
            result = function(*args, **kwargs)
            with suppress(threading.BrokenBarrierError):  # because another rank has failed
                all_done.wait(2 * timeout)
            return result
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            all_done.abort()
            dist.destroy_process_group()  # closes the connections, which ends waiting collectives of other ranks

    assert not dist.is_initialized(), "this process already has a process group"
    world = dist.distributed_c10d._world
    dist.distributed_c10d._world = ThreadLocalWorld()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with ThreadPoolExecutor(world_size) as threads:
            futures = [threads.submit(run_rank, rank) for rank in range(world_size)]
        if failures:
            raise failures[0]
        return [future.result() for future in futures]
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        dist.distributed_c10d._world = world

"""A contender that runs a model in plain threads, without any strategy; run as `python -m measuring.lock`.

Threads run at the same time only while none of them needs Python's lock. In a model of many tiny layers, most of the
time is spent in Python, which no strategy with threads can share out.
"""

import copy
import threading
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from measuring.models import CASES, CLASSES, TINY
from measuring.orders import WARM_UP, Orders

Direction = Literal["forward", "backward"]


def time_in_threads(direction: Direction, threads: int, share: int, steps: int) -> float:
    """Run passes in threads that do not wait for each other, each with parameters of its own.

    Args:
        direction: Which passes; a backward runs over the same graph again and again.
        threads: Number of threads.
        share: Every thread's batch is the whole one divided by this.
        steps: Passes of each thread.

    Returns:
        Seconds per pass: until the last thread has done all of its passes, divided by `steps`.
    """
    case = CASES[TINY]
    network = case.build()
    began: list[float] = []
    # The last thread to arrive reads the clock for all.
    start = threading.Barrier(threads, action=lambda: began.append(time.perf_counter()))
    ends: list[float] = []

    def work() -> None:
        run = _make_pass(direction, copy.deepcopy(network), case.shape, case.batch_size // share)
        for _ in range(WARM_UP):
            run()
        start.wait()
        for _ in range(steps):
            run()
        ends.append(time.perf_counter())

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return (max(ends) - began[0]) / steps


def _make_pass(
    direction: Direction, network: torch.nn.Module, shape: tuple[int, ...], batch_size: int
) -> Callable[[], object]:
    inputs, labels = torch.randn(batch_size, *shape), torch.randint(0, CLASSES, (batch_size,))
    parameters = list(network.parameters())

    def forward() -> Tensor:
        return functional.cross_entropy(network(inputs), labels)

    if direction == "forward":
        return forward
    loss = forward()
    return lambda: torch.autograd.grad(loss, parameters, retain_graph=True)


def main() -> None:
    """Run some passes for each order."""
    orders = Orders()
    torch.set_num_threads(1)
    while True:
        orders.reply([time_in_threads(**orders.wait())])


if __name__ == "__main__":
    main()

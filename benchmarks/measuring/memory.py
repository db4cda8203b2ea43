"""Memory of gradients, as torch's allocator counts it."""

import gc
import io
import json
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile, record_function

from measuring.peers import MEMORY_PEERS, OURS, RANKS, connect
from measuring.scenarios import OneProcess
from tests.support.processes import run_processes

ONE, TWO = "one batch", "two accumulated"
ALONE = "one process, for comparison"
_LAYERS, _WIDTH = 64, 512  # each gradient has 1 MiB, of 64
_STEPS = 5
_TIMES = 3
_BUILT, _FORWARD, _BACKWARD = "memory: built", "memory: forward", "memory: backward"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory beyond the parameters, in units of the size of all gradients."""

    first_peak: float  # during the first backward pass
    peak: float  # during later backward passes that synchronise
    held: float  # between steps, after `optimizer.zero_grad()`


MemoryUses = dict[str, dict[str, MemoryUse]]
"""By name of the contender, and by what a step is."""


def measure_memory() -> MemoryUses:
    """Measure training in plain torch with ours, with each peer, and with nothing that synchronises.

    The model has next to no activations: 64 square layers, and a batch of one sample. What torch has allocated since
    it was built and has not freed belongs to the gradients: they themselves, buckets and messages. The backend's own
    buffers are not seen.
    """
    with redirect_stdout(io.StringIO()):  # the profiler is talkative
        return run_processes(_measure_all, RANKS, timeout=300)[0]


def _measure_all() -> MemoryUses:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = (OURS, *MEMORY_PEERS, ALONE)
    return {name: {ONE: _measure(name, batches=1), TWO: _measure(name, batches=2)} for name in names}


def _measure(name: str, batches: int) -> MemoryUse:
    """Measure several times, and take the least: the profiler does not see what a thread of the backend frees.

    That is now and then a message, if the thread is slow to let go of it.
    """
    found = [astuple(_measure_once(name, batches)) for _ in range(_TIMES)]
    return MemoryUse(*map(min, zip(*found, strict=True)))


def _measure_once(name: str, batches: int) -> MemoryUse:
    gc.collect()
    # Only what is allocated under the profiler is known to it when it is freed.
    with profile(profile_memory=True) as profiler:
        model: Any = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)))
        with record_function(_BUILT):
            inputs = torch.ones(1, _WIDTH)
        _train(model, OneProcess(model) if name == ALONE else connect(name, model), inputs, batches)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return _read(json.loads(trace.read_text())["traceEvents"], sum(one.nbytes for one in model.parameters()))


def _train(model: nn.Module, run: Any, inputs: torch.Tensor, batches: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(_STEPS):
        # A static graph cannot begin with an accumulation.
        for batch in range(batches if step else 1):
            synchronizes = not step or batch == batches - 1
            with nullcontext() if synchronizes else run.no_sync():
                with record_function(_FORWARD if batch == 0 else ""):
                    loss = run.forward(inputs).sum()
                with record_function(_BACKWARD if synchronizes else ""):
                    run.backward(loss)
            del loss
        optimizer.step()
        optimizer.zero_grad()


def _read(events: list[dict[str, Any]], unit: int) -> MemoryUse:
    """Find the peak of each backward pass, and what was there when each later step began."""
    events = sorted((event for event in events if "ts" in event), key=lambda event: float(event["ts"]))
    totals = [
        (float(event["ts"]), event["args"]["Total Allocated"]) for event in events if event.get("name") == "[memory]"
    ]

    def find_spans(name: str) -> Iterator[tuple[float, float]]:
        for event in events:
            if event.get("name") == name:
                yield float(event["ts"]), float(event["ts"]) + float(event["dur"])

    def total_at(time: float) -> float:
        return [total for then, total in totals if then <= time][-1]

    def peak_in(begin: float, end: float) -> float:
        return max([total_at(begin), *(total for then, total in totals if begin <= then <= end)])

    ((built, _),) = find_spans(_BUILT)
    _, *later_steps = find_spans(_FORWARD)
    first_peak, *later_peaks = (peak_in(*span) for span in find_spans(_BACKWARD))
    held = max(total_at(begin) for begin, _ in later_steps)
    return MemoryUse(*((total - total_at(built)) / unit for total in (first_peak, max(later_peaks), held)))

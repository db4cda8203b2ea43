"""Devices of any kind: CPU, CUDA, XPU, MPS and others. Plain torch: never imports Lightning."""

import contextlib
import functools
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the calling thread's current one; the CPU and MPS have a single device."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    context: AbstractContextManager[Any] = getattr(torch.get_device_module(device), "device", contextlib.nullcontext)(
        device
    )
    return context


def get_rng_state(device: torch.device) -> Tensor:
    """Return the state of a device's default generator, which is kept on the host."""
    if device.type == "cpu":
        return torch.default_generator.get_state()
    with current_device(device):  # the function of MPS takes no device
        state: Tensor = torch.get_device_module(device).get_rng_state()
    return state


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Restore the result of `get_rng_state`."""
    if device.type == "cpu":
        torch.default_generator.set_state(state)
        return
    with current_device(device):
        torch.get_device_module(device).set_rng_state(state)


def seed_rng(seed: int, device: torch.device) -> None:
    """Seed the generator of one device; `torch.manual_seed` seeds all of them."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
        return
    with current_device(device):
        torch.get_device_module(device).manual_seed(seed)


def find_accelerator() -> str:
    """Return the type of this machine's accelerator, such as the one of CUDA devices, or `"cpu"` if it has none."""
    if not torch.accelerator.is_available():
        return "cpu"
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type


def memory_statistics(device: torch.device) -> Any:
    """Return the module with the statistics of a device's memory; `torch.accelerator` has them from torch 2.9 on."""
    return torch.accelerator if hasattr(torch.accelerator, "memory_stats") else torch.get_device_module(device)


@functools.cache
def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device that does not compute in double precision: MPS and some XPUs."""
    try:
        torch.ones((), dtype=torch.float64, device=device).neg()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def widened(tensor: Any, reduce_op: object) -> Any:
    """Convert integers to floating point if their mean is wanted, which Lightning would truncate."""
    is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    is_whole = isinstance(tensor, Tensor) and not tensor.is_floating_point() and not tensor.is_complex()
    return tensor.to(widest_float(tensor.device)) if is_mean and is_whole else tensor


@functools.cache
def reports_memory(device: torch.device) -> bool:
    """Return True if torch keeps statistics of a device's memory; the CPU and MPS share the memory of the host."""
    try:
        return device.type != "cpu" and bool(memory_statistics(device).memory_stats(device))
    except (AttributeError, RuntimeError):
        return False


def are_deterministic() -> bool:
    """Return True if torch raises an error instead of computing what it cannot repeat bit by bit."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def available_memory(device: torch.device) -> int:
    """Return the bytes of a device that this process holds or that are free."""
    statistics = memory_statistics(device)
    has_info = hasattr(statistics, "get_memory_info")  # the modules of devices have another name for it
    free, _ = statistics.get_memory_info(device) if has_info else statistics.mem_get_info(device)
    return int(free + statistics.memory_reserved(device))


_earlier_peaks: dict[torch.device, int] = {}


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that tensors of this process have taken on a device, before `restart_peak` too."""
    return max(int(memory_statistics(device).max_memory_allocated(device)), _earlier_peaks.get(device, 0))


def restart_peak(device: torch.device) -> None:
    """Let the device's statistics of the peak begin with the present."""
    _earlier_peaks[device] = peak_memory(device)
    memory_statistics(device).reset_peak_memory_stats(device)


class Timer:
    """Measures how long a device works on a job, on accelerators with events in the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        """Start measuring."""
        self._start = self._now()

    def stop(self) -> None:
        """Stop measuring."""
        self._stop = self._now()

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def is_done(self) -> bool:
        """Return True if the device has finished the job; does not wait."""
        return isinstance(self._stop, float) or self._stop.query()

    @property
    def seconds(self) -> float:
        """Time between start and stop; waits for the device."""
        if isinstance(self._start, float):
            return float(self._stop - self._start)
        if not self.is_done():
            self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / 1000

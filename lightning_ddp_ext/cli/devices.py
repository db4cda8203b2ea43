"""Speed of the devices of a run, and the shares of a batch that suit them."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

_UNEQUAL = 1.2  # the fastest device relative to the slowest one; less may be noise
_CLOSE = 0.1  # relative difference of a share from its device's part of the speed
_REPEATS = 5


class DeviceSpeed(NamedTuple):
    """One device, its name, and how many floating-point operations it makes in a second in a product of matrices."""

    device: str
    name: str
    speed: float


def measure_device(device: torch.device) -> DeviceSpeed:
    """Time products of float32 matrices, in well below a second."""
    size = 512 if device.type == "cpu" else 4096
    matrix = torch.ones(size, size, device=device)
    _, *times = [time_call(partial(torch.mm, matrix, matrix), device) for _ in range(1 + _REPEATS)]  # one to warm up
    named = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return DeviceSpeed(str(device), "" if named is None else str(named(device)), 2 * size**3 / statistics.median(times))


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until a device has done what a call has queued."""
    started = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started


def suggest_split(speeds: Sequence[float]) -> list[int] | None:
    """Return small integers in the proportion of the speeds, or None if these are about equal."""
    slowest = min(speeds)
    if max(speeds) < _UNEQUAL * slowest:
        return None
    exact = [speed / slowest for speed in speeds]
    for factor in range(1, 9):
        split = [round(factor * part) for part in exact]
        if all(abs(share / (factor * part) - 1) <= _CLOSE for share, part in zip(split, exact, strict=True)):
            break
    return split


def describe_devices(devices: Sequence[DeviceSpeed], noun: str) -> str:
    """Return a line for each rank or replica, and the suggested `split` if they are unequal."""
    lines = [
        f"{noun} {number}: {one.device}{f' ({one.name})' if one.name else ''}, {one.speed / 1e9:,.0f} GFLOP/s"
        for number, one in enumerate(devices)
    ]
    split = suggest_split([one.speed for one in devices]) if devices else None
    if split is not None:
        lines.append(f"suggested for `balanced_dp` and `balanced_ddp`: strategy.split={split}".replace(", ", ","))
    return "\n".join(lines)

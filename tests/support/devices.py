"""The devices that tests train on: `pytest --accelerator=NAME`; processes that tests start inherit the choice."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy, StrategyRegistry
from torch import Tensor
from torch.overrides import TorchFunctionMode

VARIABLE = "TESTS_ACCELERATOR"
_PLUGINS = {"virtual": "tests.virtual_accelerator"}  # modules whose `load` registers an accelerator
_DRAWING = {torch.rand, torch.randn, torch.randint, torch.randperm}
_FILLING = {torch.arange, torch.as_tensor, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor}
_CREATING = {*_DRAWING, *_FILLING, torch.zeros}


def choose(accelerator: str) -> None:
    """Set the accelerator of this process and of the processes that it starts."""
    os.environ[VARIABLE] = accelerator
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # single precision as on other devices


@cache
def _load(accelerator: str) -> None:
    if accelerator in _PLUGINS:
        importlib.import_module(_PLUGINS[accelerator]).load()


def accelerator() -> str:
    """Return the accelerator's name in Lightning, which is the type of its devices in torch."""
    name = os.environ.get(VARIABLE, "cpu")
    _load(name)
    return name


def is_cpu() -> bool:
    return accelerator() == "cpu"


def device_count() -> int:
    """Return the number of different devices."""
    return 1 if is_cpu() else torch.get_device_module(accelerator()).device_count()


def device(index: int = 0) -> torch.device:
    """Return the device of a replica or a rank; where devices are fewer, several replicas or ranks share one."""
    return torch.device("cpu") if is_cpu() else torch.device(accelerator(), index % device_count())


def devices(count: int) -> list[torch.device]:
    return [device(index) for index in range(count)]


def virtual_devices_lack(what: str) -> pytest.MarkDecorator:
    """Return a marker that skips a test on virtual devices; where other tests depend on its cases, they run."""
    return pytest.mark.skipif(accelerator() == "virtual", reason=f"virtual devices have no {what}")


def tolerance(on_cpu: float = 1e-12) -> float:
    """Return the largest relative difference in float64: kernels of devices add up in another order."""
    return on_cpu if is_cpu() else max(on_cpu, 1e-10)


def backend(world_size: int) -> str:
    """Return the backend for ranks on the devices: NCCL refuses ranks that share a device, gloo does not."""
    shared = accelerator() == "cuda" and world_size > device_count()
    return "gloo" if shared else dist.get_default_backend_for_device(accelerator())


def init_process_group(chosen_backend: str | None = None) -> torch.device:
    """Create the default group of a rank that `run_processes` has started, and return its current device."""
    own = device(int(os.environ["LOCAL_RANK"]))
    if not is_cpu():
        torch.accelerator.set_device_index(own)
    if not dist.is_initialized():
        dist.init_process_group(chosen_backend or backend(int(os.environ["WORLD_SIZE"])))
    return own


def trainer_options(strategy: Any = "auto", count: int = 1) -> dict[str, Any]:
    """Return `accelerator`, `strategy` and `devices` of a Trainer with as many replicas or local ranks as wanted."""
    if is_cpu():
        return {"accelerator": "cpu", "strategy": strategy, "devices": count}
    if isinstance(strategy, str) and strategy in StrategyRegistry:
        strategy = StrategyRegistry.get(strategy)
    if strategy == "auto":  # Lightning's choice for accelerators that it does not know is the CPU
        strategy = SingleDeviceStrategy(device())
    if isinstance(strategy, ParallelStrategy) and not strategy.parallel_devices:
        strategy.parallel_devices = devices(count)
    if isinstance(strategy, DDPStrategy):
        dist.Backend.default_device_backend_map[accelerator()] = backend(count)  # where Lightning looks it up
        if accelerator() != "cuda":  # otherwise Lightning's `ddp` uses streams of CUDA
            strategy.determine_ddp_device_ids = lambda: None  # type: ignore[method-assign]
    return {"accelerator": accelerator(), "strategy": strategy, "devices": min(count, device_count())}


class _TensorsOnDevice(TorchFunctionMode):
    """Create the tensors of tests on a device, with the random numbers of the CPU; the package places its own."""

    def __init__(self, own: torch.device) -> None:
        super().__init__()
        self._device = own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _CREATING or kwargs.get("device") is not None or _package_calls():
            return func(*args, **kwargs)
        if func not in _DRAWING:
            return func(*args, **{**kwargs, "device": self._device})
        requires_grad = kwargs.pop("requires_grad", False)
        drawn: Tensor = func(*args, **kwargs)
        return drawn.to(self._device).requires_grad_(requires_grad)


def _package_calls() -> bool:
    """Return True if a function of the package, rather than of a test, calls torch."""
    frame = sys._getframe(2)
    while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and f"{os.sep}lightning_ddp_ext{os.sep}" in frame.f_code.co_filename


@contextlib.contextmanager
def tensors_on_device(own: torch.device | None = None) -> Iterator[None]:
    """Create tensors of this block on a device, by default the first one, unless they say otherwise."""
    own = device() if own is None else own
    with contextlib.nullcontext() if own.type == "cpu" else _TensorsOnDevice(own):
        yield

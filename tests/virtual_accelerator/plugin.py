"""The Python part of the virtual accelerator: the module `torch.virtual`, and the registrations of `load`."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.virtual_accelerator.build import extension

NAME = "virtual"


@cache
def load() -> ModuleType:
    """Register the devices, the accelerator and the backend with torch and Lightning; return the C++ module."""
    compiled = extension()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(compiled))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        _LIBRARY.impl("_thnn_fused_lstm_cell", _lstm_cell, key)
    create = partial(_process_group, compiled)
    dist.Backend.register_backend("virtual_ccl", create, extended_api=True, devices=[NAME])
    AcceleratorRegistry.register(NAME, VirtualAccelerator, description="devices in host memory")
    return compiled


def counts() -> dict[str, int]:
    """Return how often something has happened since `reset`: host waits, copies and bytes, kernels."""
    return load().counts()


def reset() -> None:
    """Forget counts, and errors that nothing has raised."""
    load().reset()


def check() -> None:
    """Raise an error that was found where nothing could be raised."""
    load().check()


@contextlib.contextmanager
def forbid_host_waits() -> Iterator[None]:
    """Raise in this block where the host waits for a device, to see the place."""
    load().forbid_host_waits(True)
    try:
        yield
    finally:
        load().forbid_host_waits(False)


class WithoutDoublePrecision(TorchDispatchMode):
    """Lets the devices refuse float64 in this thread and in its backward passes, as MPS does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in tree_leaves(found):
            if isinstance(value, Tensor) and value.device.type == NAME and value.dtype == torch.float64:
                raise TypeError(f"{NAME} devices have no float64")
        return found


def _device_module(compiled: ModuleType) -> ModuleType:
    """Return `torch.virtual`, with the functions that torch and Lightning look for in the module of a device."""
    accelerator = torch.accelerator

    def index_of(device: Any = None) -> int:
        index = torch.device(device).index if isinstance(device, str | torch.device) else device
        return accelerator.current_device_index() if index is None else index

    def generator(device: Any = None) -> torch.Generator:
        return compiled.default_generator(index_of(device))

    def seed_all(seed: int) -> None:
        for index in range(compiled.device_count):
            compiled.default_generator(index).manual_seed(seed)

    module = ModuleType(f"torch.{NAME}")
    vars(module).update(
        _initialized=True,  # otherwise activation checkpointing does not keep the RNG state
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: compiled.device_count,
        current_device=accelerator.current_device_index,
        set_device=accelerator.set_device_index,
        device=lambda device: accelerator.device_index(index_of(device)),
        Event=lambda enable_timing=False: torch.Event(NAME, enable_timing=enable_timing),
        Stream=lambda device=None: torch.Stream(torch.device(NAME, index_of(device))),
        current_stream=accelerator.current_stream,
        synchronize=accelerator.synchronize,
        get_rng_state=lambda device=None: generator(device).get_state(),
        set_rng_state=lambda state, device=None: generator(device).set_state(state) and None,
        manual_seed=lambda seed: generator().manual_seed(seed),
        manual_seed_all=seed_all,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda: True,
    )
    return module


def _process_group(compiled: ModuleType, group: Any, options: Any) -> Any:
    """Return the backend of a new group; gloo moves its data."""
    gloo = dist.ProcessGroupGloo(group.store, group.group_rank, group.group_size, timeout=group.timeout)
    ranks = list(group.global_ranks_in_group) or list(range(group.group_size))
    return compiled.VirtualCcl(gloo, group.store, str(group.group_id), str(ranks))


def _lstm_cell(gates: Tensor, hidden: Tensor, cx: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the cell of `nn.LSTM`, for which torch has no kernel in host memory."""
    summed = gates + hidden + sum(bias for bias in biases if bias is not None)
    enter, forget, cell, leave = summed.chunk(4, 1)
    cy = forget.sigmoid() * cx + enter.sigmoid() * cell.tanh()
    return leave.sigmoid() * cy.tanh(), cy, gates.new_empty(0)


_LIBRARY = torch.library.Library("aten", "IMPL")


class VirtualAccelerator(Accelerator):
    """Lightning's view of the devices."""

    def setup_device(self, device: torch.device) -> None:
        if device.type != NAME:  # strategy="auto" with one device of an accelerator that Lightning does not know
            raise ValueError(f"the strategy is on {device}. Use `strategy=SingleDeviceStrategy('virtual:0')`.")
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return dict(torch.accelerator.memory_stats(device))

    @staticmethod
    def parse_devices(devices: int | str | Sequence[int]) -> list[int]:
        if isinstance(devices, str):
            devices = [int(index) for index in devices.split(",")] if "," in devices else int(devices)
        return list(range(devices)) if isinstance(devices, int) else list(devices)

    @staticmethod
    def get_parallel_devices(devices: Sequence[int]) -> list[torch.device]:
        return [torch.device(NAME, index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME
